"""What the low-latency operations return: pytrees of arrays, as in ``routed``."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from .routed import Handle, RouteLayout


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("tokens_per_expert", "waited_ns"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class LowLatencyStats:
    """Running totals that ``low_latency_dispatch`` adds to: arrays in, accumulated arrays out.

    Both count modulo 2**32, as JAX has no 64-bit integers by default: take differences of two
    readings, the second at most 2**31 rows and 4 seconds of waiting after the first.

    Attributes:
        tokens_per_expert: int32 ``[E_l]``, rows received for each local expert: the sum of
            ``counts``.
        waited_ns: uint32 ``[R]``, nanoseconds in which this rank had nothing to do but wait for
            that peer; 0 for itself, and everywhere on the reference backend.
    """

    tokens_per_expert: jax.Array
    waited_ns: jax.Array

    @staticmethod
    def zeros(experts_per_rank: int, num_ranks: int) -> "LowLatencyStats":
        """Totals of nothing, for one rank: ``zeros(buffer.experts_per_rank, buffer.num_ranks)``."""
        return LowLatencyStats(
            tokens_per_expert=jnp.zeros(experts_per_rank, jnp.int32),
            waited_ns=jnp.zeros(num_ranks, jnp.uint32),
        )


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        "tokens",
        "weights",
        "counts",
        "num_dropped",
        "handle",
        "token",
        "stats",
        "scales",
    ),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class LowLatencyRouted:
    """The tokens that a rank's experts received. Use ``dataclasses.replace`` to edit a field.

    Attributes:
        tokens: ``[E_l, R * T, H]`` (padded) or ``[capacity, H]`` (compact) in the buffer's dtype.
            Padded: expert e's rows are ``tokens[e, :counts[e]]``. Compact: experts lie one after
            another, as in ``Routed``. Either way an expert's rows are ordered by source rank, then
            token, then k, and rows past the counts hold anything, NaN included.
        weights: float32 ``[E_l, R * T]`` or ``[capacity]``, the entries' ``topk_weights``; 0 for
            rows that hold no token. ``low_latency_combine`` multiplies by them.
        counts: int32 ``[E_l]``, rows of each expert; the group sizes for ``jax.lax.ragged_dot`` in
            the compact layout.
        num_dropped: int32 scalar, rows that did not fit into ``capacity``; 0 when padded.
        handle: what combine needs to send the rows back; its row numbers are those of ``tokens``
            with all axes but the last made one.
        token: float32 scalar of no content, for ``after=``.
        stats: the totals given to dispatch with this operation added, or None.
        scales: as in ``Routed``, with one axis more in the padded layout; unwritten past the
            counts.
    """

    tokens: jax.Array
    weights: jax.Array
    counts: jax.Array
    num_dropped: jax.Array
    handle: Handle
    token: jax.Array
    stats: LowLatencyStats | None
    scales: jax.Array | None = None


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("x", "topk_idx", "topk_weights", "ticket", "token", "routed"),
    meta_fields=("layout", "padded"),
)
@dataclasses.dataclass(frozen=True)
class PendingDispatch:
    """A dispatch on its way: pass it to one ``low_latency_dispatch_done``, once.

    Attributes:
        x: ``[T, H]``, kept for the rows that stay on this rank.
        topk_idx: int32 ``[T, K]``, entries that name no expert, or one twice, replaced by -1.
        topk_weights: float32 ``[T, K]``.
        ticket: uint32 ``[2]``, the operation's epoch and a check of it.
        token: float32 scalar of no content, for ``after=``.
        routed: on the reference backend the finished result, else None.
        layout, padded: static facts.
    """

    x: jax.Array | None
    topk_idx: jax.Array | None
    topk_weights: jax.Array | None
    ticket: jax.Array | None
    token: jax.Array
    routed: LowLatencyRouted | None
    layout: RouteLayout
    padded: bool


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("y", "weights", "topk_idx", "recv_rows", "ticket", "token", "out"),
    meta_fields=("layout",),
)
@dataclasses.dataclass(frozen=True)
class PendingCombine:
    """A combine on its way: pass it to one ``low_latency_combine_done``, once.

    Attributes:
        y: ``[rows, H]``, kept for the rows that stay on this rank.
        weights: float32 ``[rows]``.
        topk_idx, recv_rows: of the handle.
        ticket: uint32 ``[2]``, the operation's epoch and a check of it.
        token: float32 scalar of no content, for ``after=``.
        out: on the reference backend the finished result, else None.
        layout: static facts.
    """

    y: jax.Array | None
    weights: jax.Array | None
    topk_idx: jax.Array | None
    recv_rows: jax.Array | None
    ticket: jax.Array | None
    token: jax.Array
    out: jax.Array | None
    layout: RouteLayout
