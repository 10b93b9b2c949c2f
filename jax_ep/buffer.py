"""Buffer: owns one window per rank, and the identity under which compiled programs find them."""

import contextlib
import hashlib
import itertools
import math
import warnings
import weakref
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Self

import jax
from jax.sharding import Mesh

from . import _bootstrap, _native, _windows
from .config import EpConfig, experts_per_rank
from .errors import EpDataError, EpMismatchError, EpTimeoutError, EpUsageError

# Reference buffers own no window; negative ids cannot meet those that the native registry gives.
_reference_ids = itertools.count(-1, -1)


class Buffer:
    """The memory through which the ranks of an expert-parallel group exchange rows.

    Make it outside ``jax.jit`` and close over it in the function that calls ``dispatch`` and
    ``combine``. Compiled programs hold its id only: keep the buffer alive, and open, as long as
    anything compiled from it may run. Several buffers may be alive at once. A buffer closes at the
    end of its ``with`` block, at ``close()``, when it is garbage collected, or when the interpreter
    exits.

    Axis names and sizes are checked while JAX traces. Whether a program runs over the mesh's very
    devices shows only when it runs: the native backend then raises, the reference backend, which
    owns no memory on a device, need not care.

    Args:
        mesh: the ``jax.sharding.Mesh`` that ``jax.shard_map`` uses. Its devices may be those of
            several processes: each of these makes the buffer, with the same arguments and in the
            same order as its other buffers. For the native backend they are CPU devices or GPUs of
            processes of one host or, with NVSHMEM and one process per GPU, GPUs of several.
        axis_name: the mesh axis, or tuple of axes, along which the experts are split. A rank is an
            index along it, in row-major order of the tuple as ``jax.lax.axis_index`` counts. Every
            combination of positions on the mesh's other axes is a group of its own.
        config: shapes and limits.
        backend: "native" (custom calls through the window; CPU devices, and GPUs where the package
            was built with CUDA), "reference" (``jax.lax`` collectives, any platform), or "auto":
            native where it is offered, else reference.
        exchange: how the processes tell each other what a buffer needs to be made and reset: called
            by all of them together with bytes, gives the bytes of all processes of the mesh, in
            the order of their indices. None: over JAX's distributed runtime, where a process that
            does not come within 300 s is an error that names it.

    Raises:
        EpUsageError: the axes are not in the mesh, the experts do not divide among the ranks, the
            devices are of several platforms, or of processes that the backend cannot serve
            together or that brought other arguments, the backend is not offered for them,
            two GPUs of a group cannot access each other's memory, or ``config.num_sms`` leaves
            too little of a GPU to others.
        EpError: a GPU has too little memory for the window, or CUDA failed; another process did not
            come, or failed.
    """

    def __init__(
        self,
        mesh: Mesh,
        axis_name: str | Sequence[str],
        config: EpConfig,
        *,
        backend: str = "auto",
        exchange: _bootstrap.Exchange | None = None,
    ):
        if not isinstance(config, EpConfig):
            raise EpUsageError(f"config={config!r} is not an EpConfig; pass jax_ep.EpConfig(...)")
        if not isinstance(mesh, Mesh):
            raise EpUsageError(
                f"mesh={mesh!r} is a {type(mesh).__name__}; pass the jax.sharding.Mesh of devices "
                "that jax.shard_map uses"
            )
        self._mesh = mesh
        self._config = config
        platform = _one_platform(mesh)
        self._peers = _bootstrap.Peers.of(mesh, exchange)
        with self._peers.failures_told():
            self._axis_names = _checked_axes(mesh, axis_name)
            self._num_ranks = math.prod(mesh.shape[axis] for axis in self._axis_names)
            self._experts_per_rank = experts_per_rank(config, self._num_ranks)
            self._backend = _resolve_backend(backend, platform, config.mode)
            self._fingerprint = _fingerprint(config, mesh, self._axis_names, self._backend)
            self._native = _native.load(platform) if self._backend == "native" else None
        _windows.compare(self._peers, mesh, self._axis_names, config, self._backend)
        members = _windows.Members(mesh, self._axis_names, self._peers)
        if self._native is not None:
            platform = _windows.module_for(platform, members)
            with self._peers.failures_told():
                self._native = _native.load(platform)
        if self._native is None:
            self._id = next(_reference_ids)
            self._window_bytes = 0
            self._finalizer = weakref.finalize(self, _nothing_to_close)
        else:
            self._id = _windows.create(
                self._native,
                platform,
                config,
                members,
                self._fingerprint,
            )
            # A finalizer runs once: at close(), at garbage collection or at exit.
            self._finalizer = weakref.finalize(self, self._native.close_buffer, self._id)
            self._window_bytes = self._native.window_bytes(self._id)

    @property
    def config(self) -> EpConfig:
        """The configuration the buffer was made with."""
        return self._config

    @property
    def mesh(self) -> Mesh:
        """The mesh the buffer was made for."""
        return self._mesh

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The mesh axes along which the experts are split."""
        return self._axis_names

    @property
    def num_ranks(self) -> int:
        """R, ranks in a group."""
        return self._num_ranks

    @property
    def experts_per_rank(self) -> int:
        """E_l = E / R."""
        return self._experts_per_rank

    @property
    def backend(self) -> str:
        """The backend in use: "native" or "reference"."""
        return self._backend

    @property
    def native_module(self) -> ModuleType | None:
        """The compiled module that serves the buffer; None on the reference backend."""
        return self._native

    @property
    def target_suffix(self) -> str:
        """What the names of the native module's targets end with where XLA knows them."""
        return _native.target_suffix(self._native)

    @property
    def peers(self) -> _bootstrap.Peers:
        """The processes that share the buffer."""
        return self._peers

    @property
    def id(self) -> int:
        """Number of this buffer, the same in all its processes, never given twice in any of them;
        negative on the reference."""
        return self._id

    @property
    def fingerprint(self) -> int:
        """A signed 64-bit hash of config, axes, devices and backend; the same in every process."""
        return self._fingerprint

    @property
    def window_bytes(self) -> int:
        """Bytes of one rank's window; 0 for one rank alone and for the reference backend."""
        return self._window_bytes

    @property
    def closed(self) -> bool:
        """Whether close() has run."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Waits for arrays still being computed on the buffer's devices, then frees the windows.

        Closing twice is allowed. Programs compiled from the buffer raise from then on.
        """
        if not self.closed and self._native is not None:
            _wait_for_results(frozenset(self._mesh.devices.flat))
        self._finalizer()

    def stats(self) -> dict[str, int]:
        """Counters of the native backend, epochs since the last reset(); empty for the reference.

        Raises:
            EpUsageError: the buffer is closed.
        """
        self.require_open("stats")
        return dict(self._native.stats(self._id)) if self._native else {}

    def check(self) -> None:
        """Raises what the finished operations have recorded; returns None when all was well.

        Operations run asynchronously: call ``jax.block_until_ready`` on their results first.
        Timeouts and mismatches stay recorded until ``reset()``; data faults are cleared by the call
        that raises them. Of ranks in other processes it tells timeouts and mismatches, not data
        faults. The reference backend treats faulty entries the same way but records nothing.

        Raises:
            EpTimeoutError: a rank waited for a peer past the deadline.
            EpMismatchError: ranks met with different operations.
            EpDataError: ``topk_idx`` held out-of-range or duplicate experts.
            EpUsageError: the buffer is closed, or (on GPUs) a half came out of turn.
        """
        self.require_open("check")
        if self._native is None:
            return
        records = self._native.error_records(self._id)
        if records:
            raise _peer_error(records)
        faults = self._native.take_data_faults(self._id)
        if faults:
            raise _data_error(faults, self._config.num_experts)

    def reset(self) -> None:
        """Makes the buffer usable again after a timeout or a mismatch. No operation of it may be
        running. All processes that share it call this together.

        Raises:
            EpUsageError: the buffer is closed.
            EpError: a process that shares it has ended, has closed it, or does not come.
        """
        self.require_open("reset")
        if self._native is not None:
            _windows.reset(self._native, self._id, self._peers)

    def offers(self, target: str) -> bool:
        """Whether the backend in use can do what the native target does."""
        return self._native is None or target in self._native.registrations()

    def require_open(self, op: str) -> None:
        """Raises EpUsageError if the buffer is closed; ``op`` names the caller in its message."""
        if self.closed:
            raise EpUsageError(
                f"{op} was given buffer={self!r}, which is closed; make a new Buffer, and call "
                "inside its 'with' block"
            )

    def __enter__(self) -> Self:
        self.require_open("with")
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        if exc_type is None:
            self.close()
        else:
            self._finalizer()  # an interrupt must not wait for what it interrupted

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self._window_bytes} window bytes per rank"
        return (
            f"Buffer(id={self._id}, axis_name={self._axis_names}, num_ranks={self._num_ranks}, "
            f"backend={self._backend!r}, {state}, {self._config})"
        )


def _wait_for_results(devices: frozenset[jax.Device]) -> None:
    """Blocks until no live array on any of the devices is still being computed.

    A computation that failed says so where its arrays are used; here only its end matters.
    """
    for array in jax.live_arrays():
        if not array.is_deleted() and not devices.isdisjoint(array.devices()):
            with contextlib.suppress(RuntimeError):
                array.block_until_ready()


def _nothing_to_close() -> None:
    """Closing a reference buffer only marks it closed."""


def _checked_axes(mesh: Mesh, axis_name: str | Sequence[str]) -> tuple[str, ...]:
    try:
        axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    except TypeError:
        raise EpUsageError(
            f"axis_name={axis_name!r} is a {type(axis_name).__name__}; pass a str or a tuple of str"
        ) from None
    known = f"the mesh has axes {mesh.axis_names}"
    if not axes:
        raise EpUsageError(f"axis_name={axis_name!r} is empty; name at least one axis, {known}")
    for axis in axes:
        if axis not in mesh.axis_names:
            raise EpUsageError(f"axis_name={axis_name!r}: {axis!r} is not in the mesh; {known}")
    if len(set(axes)) != len(axes):
        raise EpUsageError(f"axis_name={axis_name!r} names an axis twice; name each once")
    return axes


def _one_platform(mesh: Mesh) -> str:
    devices = list(mesh.devices.flat)
    platforms = sorted({device.platform for device in devices})
    if len(platforms) > 1:
        raise EpUsageError(
            f"mesh has devices of {platforms}; build it from devices of one platform"
        )
    return _native.platform_of(devices[0])


def _resolve_backend(backend: str, platform: str, mode: str) -> str:
    if backend not in ("auto", "native", "reference"):
        raise EpUsageError(f"backend={backend!r} is not known; use 'auto', 'native' or 'reference'")
    if backend == "reference":
        return backend
    offered = _native.serves(platform, mode)
    if backend == "native" and not offered:
        raise EpUsageError(
            f"backend='native' is not offered for {platform} devices and mode={mode!r} by this "
            "build; use backend='reference', or a mesh of CPU devices"
        )
    if offered:
        return "native"
    if platform in ("gpu", "cuda", "rocm"):
        warnings.warn(
            f"jax_ep has no native backend for {platform} devices and mode={mode!r} in this build "
            "and uses jax.lax collectives, which are slower; pass backend='reference' to silence "
            "this warning",
            stacklevel=3,
        )
    return "reference"


def _fingerprint(config: EpConfig, mesh: Mesh, axes: tuple[str, ...], backend: str) -> int:
    """64 bits of a hash that does not vary between processes, as a signed integer."""
    devices = [device.id for device in mesh.devices.flat]
    text = repr((config, tuple(mesh.shape.items()), axes, devices, backend))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _peer_error(
    records: Sequence[dict[str, Any]],
) -> EpTimeoutError | EpMismatchError | EpUsageError:
    # A timeout is often the consequence of what went wrong on another rank.
    ordered = sorted(records, key=lambda record: (record["kind"] == "timeout", record["rank"]))
    first = ordered[0]
    if first["kind"] == "usage":
        return EpUsageError(first["message"])
    error = EpMismatchError if first["kind"] == "mismatch" else EpTimeoutError
    others = "" if len(ordered) == 1 else f" ({len(ordered)} ranks reported, see .records)"
    return error(f"{first['message']}{others}; call Buffer.reset() before using it again", ordered)


def _data_error(faults: dict[str, Any], num_experts: int) -> EpDataError:
    reason = (
        f"is outside [-1, {num_experts})"
        if faults["kind"] == "out_of_range"
        else "names an expert that the token already has"
    )
    return EpDataError(
        f"{faults['count']} entries of topk_idx were treated as -1; the first, "
        f"topk_idx[{faults['token']}, {faults['k']}]={faults['value']} on rank {faults['rank']} of "
        f"group {faults['group']}, {reason}. Mend the router, or pass -1 for 'no expert'",
        count=faults["count"],
        group=faults["group"],
        rank=faults["rank"],
        token=faults["token"],
        k=faults["k"],
        value=faults["value"],
        kind=faults["kind"],
    )
