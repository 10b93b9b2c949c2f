"""What the processes of a buffer tell each other outside jit: bytes from each to all, compared."""

import contextlib
import hashlib
import itertools
import json
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from .errors import EpError, EpUsageError

Exchange = Callable[[bytes], Sequence[bytes]]

# A process may come late: it may load data or a checkpoint before it makes its buffer.
DEADLINE_S = 300.0
# The distributed runtime carries its values in gRPC messages of at most 4 MiB.
CHUNK_BYTES = 1 << 20

_FRAME = struct.Struct("<8sqB16sQ16s")
_MAGIC = b"jax_ep/1"


class Peers:
    """The processes that share a buffer, as one of them sees it.

    All of them call the same methods in the same order.

    Args:
        processes: JAX's indices of the processes, ascending, the own one among them.
        here: the own index.
        exchange: carries bytes; called by all processes together, gives everybody's in the order
            of ``processes``. Not called where there is one process.
    """

    def __init__(self, processes: Sequence[int], here: int, exchange: Exchange):
        self.processes = tuple(processes)
        self.here = here
        self._exchange = exchange

    @classmethod
    def of(cls, mesh: Mesh, exchange: Exchange | None) -> "Peers":
        """Those that have devices of the mesh. ``exchange=None``: over JAX's distributed runtime.

        Raises:
            EpUsageError: this process has no device in the mesh, or there are several processes
                and ``jax.distributed`` is not initialised.
        """
        processes = sorted({device.process_index for device in mesh.devices.flat})
        here = mesh.devices.flat[0].client.process_index()
        if here not in processes:
            raise EpUsageError(
                f"mesh has devices of processes {processes} and none of this one, {here}; make the "
                "Buffer in those processes only, or use a mesh with a device of each"
            )
        if len(processes) > 1 and exchange is None:
            exchange = runtime_exchange(processes, here)
        return cls(processes, here, exchange or (lambda own: [own]))

    @property
    def are_several(self) -> bool:
        """Whether there is any process but this one."""
        return len(self.processes) > 1

    @contextlib.contextmanager
    def failures_told(self) -> Iterator[None]:
        """What fails within fails in the others too, at their next gather()."""
        try:
            yield
        except Exception as error:
            if self.are_several:
                with contextlib.suppress(Exception):
                    self._exchange(self._frame("", str(error).encode(), failed=True))
            raise

    def gather(self, purpose: str, own: bytes) -> list[bytes]:
        """Everybody's bytes, in the order of ``processes``.

        Args:
            purpose: what this is about; the same in all processes, for example "reset".

        Raises:
            EpError: a process did not come, failed, came for another purpose, or its bytes arrived
                damaged. The message names it.
        """
        if not self.are_several:
            return [own]
        frame = self._frame(purpose, own, failed=False)
        received = self._exchange(frame)
        self._check_exchange(received, frame)
        return [
            self._payload(process, purpose, part)
            for process, part in zip(self.processes, received, strict=True)
        ]

    def compare(self, purpose: str, facts: Mapping[str, Any]) -> None:
        """Raises EpUsageError, in every process, unless all of them bring the same facts."""
        for_all = [
            json.loads(part)
            for part in self.gather(purpose, json.dumps(dict(facts), default=str).encode())
        ]
        differences = []
        for name in sorted(set().union(*for_all)):
            values = [repr(facts.get(name)) for facts in for_all]
            other = next((i for i, value in enumerate(values) if value != values[0]), None)
            if other is not None:
                differences.append(
                    f"{name} is {values[0]} in process {self.processes[0]} and {values[other]} in "
                    f"process {self.processes[other]}"
                )
        if differences:
            raise EpUsageError(
                f"the processes disagree about the buffer: {'; '.join(differences)}. Every process "
                "must make it with the same arguments, from the same versions"
            )

    def _frame(self, purpose: str, payload: bytes, *, failed: bool) -> bytes:
        about = hashlib.blake2b(purpose.encode(), digest_size=16).digest()
        digest = hashlib.blake2b(payload, digest_size=16).digest()
        head = _FRAME.pack(_MAGIC, self.here, failed, about, len(payload), digest)
        return head + payload

    def _check_exchange(self, received: Sequence[bytes], own: bytes) -> None:
        if len(received) != len(self.processes) or not all(
            isinstance(part, bytes) for part in received
        ):
            raise EpUsageError(
                f"exchange gave {len(received)} parts, or some that are not bytes; it must give "
                f"one bytes object for each of the {len(self.processes)} processes "
                f"{self.processes}, in this order"
            )
        if received[self.processes.index(self.here)] != own:
            raise EpUsageError(
                f"exchange gave process {self.here} other bytes than its own in its place; it must "
                f"give those of processes {self.processes} in this order"
            )

    def _payload(self, process: int, purpose: str, part: bytes) -> bytes:
        """The bytes that ``process`` brought, or what is wrong with them."""
        own = _FRAME.unpack(self._frame(purpose, b"", failed=False))
        if len(part) < _FRAME.size or not part.startswith(_MAGIC):
            raise EpError(f"process {process} sent {len(part)} bytes that are not jax_ep's")
        _, sender, failed, about, length, digest = _FRAME.unpack(part[: _FRAME.size])
        payload = part[_FRAME.size :]
        seen = hashlib.blake2b(payload, digest_size=16).digest()
        if (sender, length, digest) != (process, len(payload), seen):
            raise EpError(
                f"the {len(payload)} bytes in the place of process {process} are damaged, or of "
                f"process {sender}: {length} were sent"
            )
        if failed:
            raise EpError(f"process {process} failed: {payload.decode(errors='replace')}")
        if about != own[3]:
            raise EpError(
                f"process {process} is not at {purpose!r} as process {self.here} is; all processes "
                "must make, reset and notify their buffers in the same order"
            )
        return payload


_rounds: dict[tuple[int, ...], Iterator[int]] = {}
_rounds_lock = threading.Lock()


def runtime_exchange(
    processes: Sequence[int], here: int, deadline_s: float | None = None
) -> Exchange:
    """An exchange over the key-value store of JAX's distributed runtime.

    ``deadline_s=None`` stands for DEADLINE_S.

    Raises:
        EpUsageError: ``jax.distributed.initialize`` has not been called.
    """
    # JAX offers no public way to the store; its public collectives need all processes of the job,
    # devices, and have no deadline.
    from jax._src import distributed

    client = distributed.global_state.client
    if client is None:
        raise EpUsageError(
            f"mesh has devices of processes {tuple(processes)}, which cannot speak to each other: "
            "call jax.distributed.initialize() first, or pass exchange=, a function that takes "
            "bytes and gives the bytes of all these processes"
        )
    processes = tuple(processes)
    with _rounds_lock:
        rounds = _rounds.setdefault(processes, itertools.count())
    name = hashlib.blake2b(repr(processes).encode(), digest_size=8).hexdigest()
    written: list[list[str]] = []

    def exchange(own: bytes) -> list[bytes]:
        with _rounds_lock:
            prefix = f"jax_ep/{name}/{next(rounds)}"
        written.append(_write(client, f"{prefix}/{here}", own))
        limit_s = DEADLINE_S if deadline_s is None else deadline_s
        end = time.monotonic() + limit_s
        received = [
            own if process == here else _read(client, prefix, process, processes, end, limit_s)
            for process in processes
        ]
        # Whoever has written in this round has read all of the one before.
        while len(written) > 1:
            for key in written.pop(0):
                client.key_value_delete(key)
        return received

    return exchange


def _write(client: Any, prefix: str, value: bytes) -> list[str]:
    """Writes a value in chunks; the first says how many there are. Returns the keys."""
    count = max(1, -(-len(value) // CHUNK_BYTES))
    keys = [f"{prefix}/{chunk}" for chunk in range(count)]
    for chunk, key in enumerate(keys):
        part = value[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]
        client.key_value_set_bytes(key, count.to_bytes(4, "little") + part)
    return keys


def _read(
    client: Any,
    prefix: str,
    process: int,
    processes: tuple[int, ...],
    end: float,
    deadline_s: float,
) -> bytes:
    def chunk(number: int) -> bytes:
        left_ms = max(1, round(1000 * (end - time.monotonic())))
        return client.blocking_key_value_get_bytes(f"{prefix}/{process}/{number}", left_ms)

    try:
        first = chunk(0)
        rest = [chunk(i) for i in range(1, int.from_bytes(first[:4], "little"))]
    except jax.errors.JaxRuntimeError as error:
        missing = []
        for other in processes:
            try:
                client.key_value_try_get_bytes(f"{prefix}/{other}/0")
            except jax.errors.JaxRuntimeError:
                missing.append(other)
        names = ", ".join(map(str, missing or [process]))
        raise EpError(
            f"process {names} of processes {processes} did not come within {deadline_s:g} s to "
            f"make, reset or close a buffer with the others: it has died, is late, or uses another "
            f"mesh ({str(error).splitlines()[0]})"
        ) from error
    return b"".join(part[4:] for part in [first, *rest])
