"""notify_dispatch: the host learns how many rows come while the devices go on."""

import functools
import math
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from . import _native
from ._order import source
from ._primitives import NO_TICKET
from ._route import check_topk_idx, require_routings, routing_group, routing_of
from ._windows import Members, default_timeout_s
from .buffer import Buffer
from .config import positive_int
from .errors import EpError, EpTimeoutError, EpUsageError
from .ops import MAX_CAPACITY
from .routing import Routing, RoutingGroup

# One look at the counters; between two of them Python takes signals, and errors of the operation
# are looked for.
_LOOK_S = 0.05


def notify_dispatch(
    buffer: Buffer, topk_idx: jax.Array, *, timeout_s: float | None = None, after: Any = None
) -> "Notice":
    """Starts the exchange of a dispatch's counts; call it outside ``jax.jit``, on global arrays.

    Returns at once. The devices exchange counts and go on with what else is queued; meanwhile the
    Notice tells the host how many rows come, so that it can pick a ``capacity`` of the right size::

        notice = jax_ep.notify_dispatch(buffer, topk_idx)
        capacity = notice.capacity(multiple_of=1024)
        out = step(x, notice.routing, topk_weights, capacity=capacity)  # jitted, capacity static

    Args:
        buffer: an open Buffer.
        topk_idx: int32 ``[N * T, K]`` as for ``dispatch``, of all N devices of ``buffer.mesh``,
            split along the first axis as ``PartitionSpec(buffer.mesh.axis_names)`` says.
        timeout_s: how long one of the Notice's methods may wait for counts; by default the config's
            ``timeout_s``, or 20 on CPU and 300 elsewhere.
        after: what the exchange must come after, where several processes share the buffer and
            ``topk_idx`` does not depend on it: what ``dispatch`` takes as ``after``, of an earlier
            program over ``buffer.mesh``.

    Returns:
        A Notice.

    Raises:
        EpUsageError: an argument does not fit, the buffer is closed or its backend offers no
            routings, or ``topk_idx`` is being traced.
    """
    if not isinstance(buffer, Buffer):
        raise EpUsageError(
            f"notify_dispatch: buffer={buffer!r} is a {type(buffer).__name__}; pass the "
            "jax_ep.Buffer"
        )
    buffer.require_open("notify_dispatch")
    require_routings("notify_dispatch", buffer)
    if isinstance(topk_idx, jax.core.Tracer):
        raise EpUsageError(
            "notify_dispatch was called inside jax.jit or another transform, where the host can "
            "wait for nothing; call jax_ep.route there"
        )
    check_topk_idx(buffer, topk_idx, buffer.mesh.size)
    wait_s = _checked_timeout(buffer, timeout_s)
    module = buffer.native_module
    ticket = module.next_ticket(buffer.id) if module is not None else NO_TICKET
    everywhere = NamedSharding(buffer.mesh, PartitionSpec(buffer.mesh.axis_names))
    operands = [jax.device_put(topk_idx, everywhere), np.uint32(ticket)]
    spec = None
    if after is not None:
        operands.append(_earlier_array(buffer, after))
        spec = operands[-1].sharding.spec
    routing = _program(buffer.mesh, routing_group(buffer), buffer.backend, spec)(*operands)
    return Notice(buffer, routing, ticket, wait_s)


class Notice:
    """What ``notify_dispatch`` returns: the routing, and the counts as soon as the host has them.

    Methods wait for the counts of all local ranks without waiting for the devices' queues: they
    poll memory that the operation writes (the reference backend waits for its results). What was
    read once is kept. A Notice that is never read costs nothing, but only the last
    16 of a buffer can be read for the first time. Arrays are in the order of the mesh's devices, N
    of them, as the first axis of global arrays is.

    Of several processes each reads the counters of its own ranks, which know all of their group.
    Only where a process has no rank of some group do processes tell each other what they read: all
    of them must then read the same Notices first in the same order.

    Attributes:
        routing: the Routing, global arrays to be passed into ``jax.shard_map`` for ``dispatch(...,
            routing=...)``, in one program or many.
    """

    def __init__(self, buffer: Buffer, routing: Routing, ticket: int, timeout_s: float):
        self.routing = routing
        self._buffer = buffer
        self._ticket = ticket
        self._timeout_s = timeout_s
        self._counts: np.ndarray | None = None

    def num_recv_tokens(self) -> np.ndarray:
        """Rows that each rank receives, int64 ``[N]``: the sum of its ``valid_sizes`` where none
        is dropped.

        Raises:
            EpTimeoutError: a counter did not come; the message names it and its rank.
            EpUsageError: 16 later notices were made before this one was first read, or the
                buffer was closed before.
            EpError: the operation failed.
        """
        return self._rows()[:, 0].copy()

    def recv_tokens_per_expert(self) -> np.ndarray:
        """Rows that each rank receives for each of its experts, int64 ``[N, E_l]``: its
        ``valid_sizes`` where none is dropped.

        Raises:
            EpError: as ``num_recv_tokens``.
        """
        rows = self._rows()
        experts_per_rank = self._buffer.experts_per_rank
        first = self._rank_of_device() * experts_per_rank
        own = 1 + first[:, None] + np.arange(experts_per_rank)
        return np.take_along_axis(rows, own, axis=1)

    def capacity(self, *, multiple_of: int = 1, expert_alignment: int = 1) -> int:
        """The ``capacity`` for ``dispatch`` that drops no row on any rank; the same for all ranks.

        Args:
            multiple_of: round up to a multiple of this many rows. Programs are compiled once for
                every capacity they meet: the larger the multiple, the fewer.
            expert_alignment: that of the dispatch; the capacity is a multiple of it too.

        Returns:
            At least one multiple.

        Raises:
            EpUsageError: an argument does not fit, or as ``num_recv_tokens``.
            EpError: as ``num_recv_tokens``.
        """
        multiple = positive_int("multiple_of", multiple_of, at_most=MAX_CAPACITY)
        alignment = positive_int("expert_alignment", expert_alignment, at_most=MAX_CAPACITY)
        per_expert = self._rows()[:, 1:].reshape(-1, self._buffer.num_ranks, self._experts)
        most = int((-(-per_expert // alignment) * alignment).sum(axis=2).max())
        bucket = math.lcm(multiple, alignment)
        rows = max(1, -(-most // bucket)) * bucket
        if rows > MAX_CAPACITY:
            raise EpUsageError(
                f"multiple_of={multiple} and expert_alignment={alignment} make a capacity of "
                f"{rows} rows, which does not fit into int32; pass smaller ones"
            )
        return rows

    @property
    def _experts(self) -> int:
        return self._buffer.experts_per_rank

    def _rows(self) -> np.ndarray:
        """int64 ``[N, 1 + E]``: rows that the rank receives, then rows for each expert of its
        group."""
        if self._counts is None:
            polled = self._ticket != NO_TICKET
            read = self._wait_for_counters if polled else self._counts_of_routing
            peers, processes = self._buffer.peers, self._processes()
            if all(set(group) == set(peers.processes) for group in processes):
                rows = read()
            else:
                with peers.failures_told():
                    rows = read()
                parts = peers.gather(f"read notice {self._ticket}", rows.tobytes())
                rows = np.max([np.frombuffer(part, np.int64) for part in parts], axis=0)
            self._counts = rows.reshape(self._buffer.mesh.size, -1)[self._place_of_device()]
        return self._counts

    def _processes(self) -> np.ndarray:
        """The processes of ``[group][rank]``."""
        buffer = self._buffer
        return np.array(Members(buffer.mesh, buffer.axis_names, buffer.peers).processes())

    def _rows_of_groups(self, per_expert: dict[int, np.ndarray]) -> np.ndarray:
        """As ``_rows``, ranks in [group][rank] order, from rows for each expert of some groups.
        -1 in other groups."""
        num_ranks = self._buffer.num_ranks
        rows = np.full((self._buffer.mesh.size, 1 + self._buffer.config.num_experts), -1, np.int64)
        for group, counts in per_expert.items():
            block = rows[group * num_ranks : (group + 1) * num_ranks]
            block[:, 0] = counts.reshape(num_ranks, -1).sum(axis=1)
            block[:, 1:] = counts
        return rows

    def _counts_of_routing(self) -> np.ndarray:
        places = dict(zip(self._buffer.mesh.devices.flat, self._place_of_device(), strict=True))
        per_expert = {
            places[shard.device] // self._buffer.num_ranks: np.asarray(shard.data, np.int64).sum(0)
            for shard in self.routing.counts.addressable_shards
        }
        return self._rows_of_groups(per_expert)

    def _rows_of_counters(self, values: np.ndarray) -> np.ndarray:
        """values: of ``[group][rank]``, all counters; of other processes' ranks: anything."""
        by_place = values.reshape(self._buffer.mesh.size, -1)
        here = self._processes().reshape(-1) == self._buffer.peers.here
        places = np.flatnonzero(here)
        per_expert = {at // self._buffer.num_ranks: by_place[at, 1:] for at in places}
        rows = self._rows_of_groups(per_expert)
        rows[places, 0] = by_place[places, 0]
        return rows

    def _wait_for_counters(self) -> np.ndarray:
        deadline = time.monotonic() + self._timeout_s
        while True:
            self._buffer.require_open("a Notice")
            left = deadline - time.monotonic()
            module = self._buffer.native_module
            look = max(0.0, min(left, _LOOK_S))
            found = module.read_notice(self._buffer.id, self._ticket, look)
            if found["state"] == "ready":
                values = np.frombuffer(found["values"], np.uint32).astype(np.int64)
                return self._rows_of_counters(values)
            if found["state"] == "reused":
                raise EpUsageError(self._reused_text(found, module.num_notice_slots))
            self._raise_failure(found)
            if left <= 0:
                raise self._timeout(found)

    def _raise_failure(self, found: dict[str, Any]) -> None:
        """Raises if the operation has failed: what it has not counted will not come."""
        records = self._buffer.native_module.error_records(self._buffer.id)
        if records:
            try:
                self._buffer.check()
            except EpError as error:
                raise type(error)(f"{self._missing(found)}: {error}", records) from None
        if self.routing.counts.is_deleted() or not self.routing.counts.is_ready():
            return
        try:
            self.routing.counts.block_until_ready()
        except RuntimeError as error:
            raise EpError(f"{self._missing(found)}: {error}") from error

    def _missing(self, found: dict[str, Any]) -> str:
        experts = self._experts
        expert = found["counter"] - 1
        counter = (
            "recv_tokens_per_expert["
            f"{expert % experts}] of rank {expert // experts}, as rank {found['rank']} counts it"
            if expert >= 0
            else f"num_recv_tokens of rank {found['rank']}"
        )
        return (
            f"notify_dispatch, ticket {self._ticket}: {counter} (group {found['group']}) is missing"
        )

    def _timeout(self, found: dict[str, Any]) -> EpTimeoutError:
        message = (
            f"{self._missing(found)} after {self._timeout_s} s (its place holds ticket "
            f"{found['seen']}). Some rank has not run the operation: what is queued before it on "
            "the devices takes longer, or a program of another rank does not come. Raise "
            "timeout_s, or see buffer.check()"
        )
        record = {"kind": "timeout", "op": "notify", "wait": "its counters", "epoch": 0}
        record |= {"group": found["group"], "rank": found["rank"], "peer": found["rank"]}
        record |= {"expected": self._ticket, "seen": found["seen"], "message": message}
        return EpTimeoutError(message, [record])

    def _reused_text(self, found: dict[str, Any], slots: int) -> str:
        return (
            f"{self._missing(found)}: ticket {found['seen']} has taken its place, since {slots} "
            "later notices were made before this one was read. Read a Notice in time, or take "
            "the counts from notice.routing.counts"
        )

    def _place_of_device(self) -> np.ndarray:
        """For every device of the mesh, in its order, its place in [group][rank] order."""
        mesh, axes = self._buffer.mesh, self._buffer.axis_names
        others = tuple(axis for axis in mesh.axis_names if axis not in axes)
        order = [mesh.axis_names.index(axis) for axis in others + axes]
        devices = np.arange(mesh.size).reshape(mesh.devices.shape).transpose(order).reshape(-1)
        return np.argsort(devices)

    def _rank_of_device(self) -> np.ndarray:
        return self._place_of_device() % self._buffer.num_ranks


def _earlier_array(buffer: Buffer, after: Any) -> jax.Array:
    """The array of ``after``, which must lie on the buffer's mesh."""
    array = source("notify_dispatch", after)
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding) or sharding.mesh != buffer.mesh:
        raise EpUsageError(
            f"notify_dispatch: after lies where {sharding} says; pass a result of a program over "
            "buffer.mesh, or leave it out and call jax.block_until_ready on it in every process"
        )
    return array


@functools.lru_cache(maxsize=64)
def _program(mesh: Mesh, group: RoutingGroup, backend: str, after_spec: PartitionSpec | None):
    """The jitted operation; holds no Buffer, so that none is kept alive."""

    def notify(topk_idx: jax.Array, ticket: jax.Array, after: jax.Array | None = None) -> Routing:
        return routing_of(backend, group, topk_idx, ticket, after)

    everywhere = PartitionSpec(mesh.axis_names)
    in_specs = [everywhere, PartitionSpec()] + ([] if after_spec is None else [after_spec])
    return jax.jit(jax.shard_map(notify, mesh=mesh, in_specs=tuple(in_specs), out_specs=everywhere))


def _checked_timeout(buffer: Buffer, timeout_s: Any) -> float:
    if timeout_s is None:
        platform = _native.platform_of(buffer.mesh.devices.flat[0])
        return default_timeout_s(buffer.config, platform)
    number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if not number or not 0 < timeout_s < math.inf:
        raise EpUsageError(f"timeout_s={timeout_s!r} is not a positive number of seconds")
    return float(timeout_s)
