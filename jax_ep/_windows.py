"""Makes, compares and resets the native side of a buffer, in one process or in several together."""

import contextlib
import dataclasses
import importlib.metadata
import json
import math
import os
import pathlib
import platform as machine
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from . import _native, _transports
from ._bootstrap import Peers
from .config import EpConfig
from .errors import EpError, EpUsageError

DEFAULT_TIMEOUT_S = {"cpu": 20.0}
DEFAULT_TIMEOUT_OTHER_S = 300.0

_BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")


class Members:
    """The ranks of a mesh by group, and the processes that have them.

    Args:
        mesh: the buffer's.
        axes: those along which ranks are counted; groups are counted along the others.
        peers: the processes of the mesh.
    """

    def __init__(self, mesh: Mesh, axes: tuple[str, ...], peers: Peers):
        others = tuple(axis for axis in mesh.axis_names if axis not in axes)
        order = [mesh.axis_names.index(axis) for axis in others + axes]
        num_ranks = math.prod(mesh.shape[axis] for axis in axes)
        self._groups = np.transpose(mesh.devices, order).reshape(-1, num_ranks)
        self.peers = peers

    def device_ordinals(self) -> list[list[int]]:
        """``[group][rank]``: what XLA tells a handler of its device; -1 for other processes'."""

        def ordinal(device: jax.Device) -> int:
            if device.process_index != self.peers.here:
                return -1
            # XLA:CPU counts a handler's device among all processes', XLA:GPU among the host's.
            return device.id if device.platform == "cpu" else device.local_hardware_id

        return [[ordinal(device) for device in group] for group in self._groups]

    def processes(self) -> list[list[int]]:
        """``[group][rank]``: JAX's process indices."""
        return [[device.process_index for device in group] for group in self._groups]


def default_timeout_s(config: EpConfig, platform: str) -> float:
    """Seconds that a wait may last: the config's, or the platform's default."""
    return config.timeout_s or DEFAULT_TIMEOUT_S.get(platform, DEFAULT_TIMEOUT_OTHER_S)


def compare(
    peers: Peers, mesh: Mesh, axes: tuple[str, ...], config: EpConfig, backend: str
) -> None:
    """Raises EpUsageError in every process unless all of them make the same buffer."""
    if not peers.are_several:
        return
    own = [d for d in mesh.devices.flat if d.process_index == peers.here]
    facts: dict[str, Any] = {
        "the jax_ep version": importlib.metadata.version("jax_ep"),
        "the jax version": jax.__version__,
        "the mesh": repr(dict(mesh.shape)),
        "the mesh's device order": repr([device.id for device in mesh.devices.flat]),
        "axis_name": repr(axes),
        "backend": backend,
        "the kind of the devices": repr(sorted({device.device_kind for device in own})),
    }
    if own[0].platform == "gpu":
        for variable in (_transports.FORCE_REMOTE, _transports.TRANSPORT):
            facts[f"{variable} in the environment"] = os.getenv(variable, "")
    for field in dataclasses.fields(config):
        facts[f"config.{field.name}"] = str(getattr(config, field.name))
    peers.compare("make a buffer", facts)


def module_for(platform: str, members: Members) -> str:
    """The name of the module that serves the buffer, the same in all its processes.

    Raises:
        EpUsageError: the processes are such as no module serves together.
    """
    peers = members.peers
    if platform != "cuda" or not peers.are_several:
        return platform
    gpus = sum(ordinal >= 0 for group in members.device_ordinals() for ordinal in group)
    place = _place()
    own = [place["host"], place["boot"] or place["host"], gpus, _native.is_built("nvshmem")]
    everyone = [json.loads(part) for part in peers.gather("find", json.dumps(own).encode())]
    return _transports.module_for_gpus(
        [
            _transports.Process(index, *facts)
            for index, facts in zip(peers.processes, everyone, strict=True)
        ],
        _transports.Wishes.read(),
    )


def create(
    native: ModuleType, platform: str, config: EpConfig, members: Members, fingerprint: int
) -> int:
    """Makes the native buffer of this process, sharing memory with those of the other processes.

    Returns:
        Its id, the same in all of them.

    Raises:
        EpUsageError: the native module refuses the arguments, or the processes are not those of
            one user on one host.
        EpError: the memory cannot be had, or another process failed or did not come.
    """
    settings = {
        "device_ordinals": members.device_ordinals(),
        "fingerprint": fingerprint,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "hidden": config.hidden,
        "itemsize": config.dtype.itemsize,
        "tokens_per_epoch": config.tokens_per_epoch,
        "max_tokens_per_rank": config.max_tokens_per_rank,
        "timeout_s": default_timeout_s(config, platform),
    }
    if platform in ("cuda", "nvshmem"):
        settings["num_sms"] = config.num_sms or 0
        settings["low_latency"] = config.mode == "low_latency"
    peers = members.peers
    if not peers.are_several:
        return _make(native, settings)
    settings["id"] = _agreed_id(native, platform, peers)
    try:
        if platform == "cuda":
            _share_gpus(native, settings, peers)
        elif platform == "nvshmem":
            _share_symmetric(native, settings, config, members)
        else:
            settings["processes"], settings["here"] = members.processes(), peers.here
            _share(native, settings, peers)
    except BaseException:
        native.close_buffer(settings["id"])
        raise
    return settings["id"]


def reset(native: ModuleType, buffer_id: int, peers: Peers) -> None:
    """Resets the native buffer: nobody clears before all have stopped, nobody goes on before all
    have cleared.

    Raises:
        EpError: another process failed or did not come.
    """
    if not peers.are_several:
        native.reset_buffer(buffer_id)
        return
    gone = native.absent_processes(buffer_id)
    if gone:
        raise EpError(
            f"buffer {buffer_id} cannot be reset: it is shared with {'; '.join(gone)}. Close it"
        )
    with peers.failures_told():
        native.drain_buffer(buffer_id)
    peers.gather(f"stop before the reset of buffer {buffer_id}", b"")
    with peers.failures_told():
        native.reset_buffer(buffer_id)
    peers.gather(f"go on after the reset of buffer {buffer_id}", b"")


def _make(native: ModuleType, settings: dict[str, Any]) -> int:
    with _errors_of_ours():
        return native.create_buffer(**settings)


@contextlib.contextmanager
def _errors_of_ours() -> Iterator[None]:
    """Errors of the native module come with the classes of ours."""
    try:
        yield
    except ValueError as error:
        raise EpUsageError(str(error)) from error
    except RuntimeError as error:
        raise EpError(f"no buffer could be made: {error}") from error


def _place() -> dict[str, Any]:
    return {
        "host": machine.node(),
        "boot": _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else "",
        "user": os.geteuid(),
    }


def _agreed_id(native: ModuleType, platform: str, peers: Peers) -> int:
    """An id that is new in every process, all of which share a host and a user, or NVSHMEM."""
    own = {"id": native.next_buffer_id(), **_place()}
    everyone = [json.loads(part) for part in peers.gather("number", json.dumps(own).encode())]
    for process, other in zip(peers.processes, everyone, strict=True):
        first = everyone[0]
        if platform != "nvshmem" and any(other[name] != first[name] for name in ("boot", "user")):
            raise EpUsageError(
                f"process {peers.processes[0]} is on host {first['host']} as user {first['user']}, "
                f"process {process} on host {other['host']} as user {other['user']}; {platform} "
                "devices exchange rows through memory that one user's processes share on one host, "
                "so start all processes there, or pass backend='reference'"
            )
    return max(other["id"] for other in everyone)


def _share(native: ModuleType, settings: dict[str, Any], peers: Peers) -> None:
    """The first process makes the shared memory, the others map it, then nobody else can."""
    offer, buffer_id = b"", settings["id"]
    is_first = peers.here == peers.processes[0]
    with peers.failures_told():
        if is_first:
            _make(native, settings)
            offer = native.segment_offer(buffer_id).encode()
    offer = peers.gather("offer shared memory", offer)[0].decode()
    with peers.failures_told():
        if not is_first:
            _make(native, settings | {"segment_offer": offer})
    peers.gather("map shared memory", b"")
    native.join_buffer(buffer_id)


def _share_gpus(native: ModuleType, settings: dict[str, Any], peers: Peers) -> None:
    """Every process takes memory for its own ranks and maps that of all others."""
    buffer_id = settings["id"]
    with peers.failures_told():
        _make(native, settings)
        with _errors_of_ours():
            offer = native.memory_offer(buffer_id)
    offers = peers.gather("offer windows", offer)
    with peers.failures_told(), _errors_of_ours():
        native.join_buffer(buffer_id, offers)
    peers.gather("map windows", b"")


def _share_symmetric(
    native: ModuleType, settings: dict[str, Any], config: EpConfig, members: Members
) -> None:
    """Every process takes the same places of NVSHMEM's heap.

    What takes them waits for all processes, without a deadline: each step begins once all have told
    that the one before went well.
    """
    buffer_id, peers = settings["id"], members.peers
    try:
        ordinal = _start_nvshmem(native, settings, peers)
        settings["staging"] = _reserve(native, buffer_id, ordinal, config, members)
        with peers.failures_told():
            _make(native, settings)
    except BaseException:
        native.drop_reservation(buffer_id)
        raise
    peers.gather("open windows", b"")


def _start_nvshmem(native: ModuleType, settings: dict[str, Any], peers: Peers) -> int:
    """Starts it, or finds it started; returns this process's GPU."""
    (ordinal,) = (n for group in settings["device_ordinals"] for n in group if n >= 0)
    is_first, started, unique_id = peers.here == peers.processes[0], native.is_started(), b""
    with peers.failures_told(), _errors_of_ours():
        if is_first and not started:
            unique_id = native.unique_id()
    everyone = peers.gather("start NVSHMEM", bytes([started]) + unique_id)
    if len({part[0] for part in everyone}) > 1:
        raise EpUsageError(
            "NVSHMEM runs in some of the buffer's processes and not in others; start it in all of "
            f"{peers.processes} or in none, and make all buffers across nodes of the same processes"
        )
    with peers.failures_told(), _errors_of_ours():
        native.join_world(
            ordinal=ordinal,
            processes=list(peers.processes),
            pe=peers.processes.index(peers.here),
            unique_id=everyone[0][1:],
        )
    peers.gather("take places of NVSHMEM's heap", b"")
    return ordinal


def _reserve(
    native: ModuleType, buffer_id: int, ordinal: int, config: EpConfig, members: Members
) -> bool:
    """Takes control block and window; whether the window has send regions."""
    peers = members.peers
    (group,) = (group for group in members.processes() if peers.here in group)
    with peers.failures_told(), _errors_of_ours():
        staging = native.reserve_control(
            id=buffer_id,
            ordinal=ordinal,
            pes=[peers.processes.index(process) for process in group],
            only_puts=_transports.Wishes.read().only_puts,
        )
    own = json.dumps([staging, native.windows_given_back()]).encode()
    everyone = [json.loads(part) for part in peers.gather("compare windows", own)]
    staging = any(needs for needs, _ in everyone)
    num_bytes = _native.window_layout(
        num_ranks=len(group),
        tokens_per_epoch=config.tokens_per_epoch,
        num_experts=config.num_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        row_bytes=config.row_bytes,
        staging=staging,
        records=config.mode == "low_latency",
    )["total_bytes"]
    number = _transports.window_for_all([windows for _, windows in everyone], num_bytes)
    if number < 0:
        with peers.failures_told(), _errors_of_ours():
            native.require_room(id=buffer_id, bytes=num_bytes)
        peers.gather("find room for windows", b"")
    with peers.failures_told(), _errors_of_ours():
        native.reserve_window(id=buffer_id, number=number, bytes=num_bytes)
    peers.gather("make windows", b"")
    return staging
