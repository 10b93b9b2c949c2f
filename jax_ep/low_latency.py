"""The public low-latency operations: for decode steps, where latency is everything."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from . import _float8, _low_latency_primitives, _low_latency_reference, _low_latency_vjp
from ._low_latency_checks import (
    check_combine,
    check_dispatch,
    check_pending,
    check_stats,
)
from ._order import behind, order_token
from ._primitives import cast_varying
from .buffer import Buffer
from .errors import EpUsageError
from .low_latency_routed import (
    LowLatencyRouted,
    LowLatencyStats,
    PendingCombine,
    PendingDispatch,
)
from .routed import Handle, RouteLayout


def low_latency_dispatch(
    buffer: Buffer,
    x: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array,
    *,
    layout: str = "padded",
    capacity: int | None = None,
    quantize: str | None = None,
    scale_format: str = "float32",
    dequantize: bool = False,
    stats: LowLatencyStats | None = None,
    after: Any = None,
) -> LowLatencyRouted:
    """Sends every token of a decode step to the ranks that hold its experts.

    Call it inside ``jax.shard_map``, with the same shapes on all ranks, on a buffer made with
    ``EpConfig(mode="low_latency")``. Pure, as ``dispatch`` is, and differentiable in ``x`` and
    ``topk_weights``.

    Args:
        buffer: an open Buffer made for the mesh that ``jax.shard_map`` runs over.
        x: ``[T, H]`` in the config's dtype, this rank's tokens; T from 0 to
            ``max_tokens_per_rank``.
        topk_idx: int32 ``[T, K]``, as in ``dispatch``.
        topk_weights: float32 ``[T, K]``.
        layout: "padded" gives every expert a block of ``R * T`` rows, for batched matmuls; nothing
            can be dropped. "compact" puts experts one after another, for ``jax.lax.ragged_dot``.
        capacity: rows of a compact result, as in ``dispatch``; None for all that can arrive.
        quantize, scale_format, dequantize: as in ``dispatch``.
        stats: totals to add this operation to; they come back as ``LowLatencyRouted.stats``.
        after: what this operation must come after, where nothing else says so: a Routed, a
            Routing, a LowLatencyRouted, a pending start or any array with elements. Gradients are
            ordered in reverse. (On the reference backend XLA orders its own collectives.)

    Returns:
        A LowLatencyRouted. Rows past the counts are left unwritten: mask them before a sum over
        rows, a gradient of a dense matmul included.

    Raises:
        EpUsageError: an argument does not fit, the buffer is closed or of the other mode, or the
            call is not inside ``jax.shard_map`` over the buffer's mesh with all its axes larger
            than 1 manual.
    """
    op = "low_latency_dispatch"
    facts, padded = check_dispatch(
        *(op, buffer, x, topk_idx, topk_weights),
        layout=layout,
        capacity=capacity,
        quantize=quantize,
        scale_format=scale_format,
        dequantize=dequantize,
    )
    x = _float8.without_gradient(facts.float8, op, jnp.asarray(x))
    stats = check_stats(buffer, stats)
    arrays = jax.tree.map(jnp.asarray, (x, topk_idx, topk_weights, stats, order_token(op, after)))
    return _fused_dispatch(buffer, facts, padded, _cast_tree(buffer, arrays))


def low_latency_combine(
    buffer: Buffer, y: jax.Array, routed: LowLatencyRouted, *, after: Any = None
) -> jax.Array:
    """Brings the experts' outputs back and sums them: ``out[t] = sum over k of weight_k * y_k``.

    The weights are ``routed.weights``; sums are made as in ``combine``. Pure, and differentiable in
    ``y`` and ``routed.weights``. The cotangent of rows that hold no token is zero.

    Args:
        buffer: the Buffer that dispatched.
        y: one output row for each row of ``routed.tokens``, of its shape, in the config's dtype.
            Rows that hold no token are not read.
        routed: the dispatch's result.
        after: as in ``low_latency_dispatch``.

    Returns:
        ``[T, H]`` in the config's dtype, this rank's tokens.

    Raises:
        EpUsageError: as ``low_latency_dispatch``, or ``routed`` is another buffer's.
    """
    out, _ = combine_in_turn(buffer, y, routed, order_token("low_latency_combine", after))
    return out


def combine_in_turn(
    buffer: Buffer, y: jax.Array, routed: LowLatencyRouted, token: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """``low_latency_combine`` behind an order token, and a token that stands for its end.

    Not exported: an array has nowhere to keep the second. For chains of nothing but combines.
    """
    facts = check_combine("low_latency_combine", buffer, y, routed)
    arrays = (*_combine_arrays(y, routed), token)
    backend = _low_latency_reference if buffer.backend == "reference" else _low_latency_vjp
    return backend.combine(facts, *_cast_tree(buffer, arrays))


def low_latency_dispatch_start(
    buffer: Buffer,
    x: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array,
    *,
    layout: str = "padded",
    capacity: int | None = None,
    quantize: str | None = None,
    scale_format: str = "float32",
    dequantize: bool = False,
    after: Any = None,
) -> PendingDispatch:
    """The sending half of ``low_latency_dispatch``: what runs until its done hides the transfer.

    Two dispatches may be on their way at a time (a fused one counts as one); a third fails with
    EpUsageError. A half is no pure function: it cannot be differentiated or vmapped, and every
    start needs its one done.

    Args:
        buffer, x, topk_idx, topk_weights, layout, capacity, quantize, scale_format, dequantize,
            after: as in ``low_latency_dispatch``.

    Returns:
        What ``low_latency_dispatch_done`` takes.

    Raises:
        EpUsageError: as ``low_latency_dispatch``.
    """
    op = "low_latency_dispatch_start"
    facts, padded = check_dispatch(
        *(op, buffer, x, topk_idx, topk_weights),
        layout=layout,
        capacity=capacity,
        quantize=quantize,
        scale_format=scale_format,
        dequantize=dequantize,
    )
    arrays = _half_arrays(op, buffer, (x, topk_idx, topk_weights, order_token(op, after)))
    x, topk_idx, topk_weights, token = arrays
    ticket = routed = None
    if buffer.backend == "reference":
        routed = _fused_dispatch(buffer, facts, padded, (x, topk_idx, topk_weights, None, token))
        x, topk_idx, topk_weights, token = None, None, None, routed.token
    else:
        topk_idx, ticket, token = _low_latency_primitives.dispatch_start(
            facts, x, topk_idx, topk_weights, token
        )
    return PendingDispatch(
        x=x,
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        ticket=ticket,
        token=token,
        routed=routed,
        layout=facts,
        padded=padded,
    )


def low_latency_dispatch_done(
    buffer: Buffer,
    pending: PendingDispatch,
    *,
    stats: LowLatencyStats | None = None,
    after: Any = None,
) -> LowLatencyRouted:
    """The receiving half of ``low_latency_dispatch``.

    Args:
        buffer: the Buffer of the start.
        pending: the start's result; each is used once.
        stats: totals to add this operation to, waits in this half only.
        after: as in ``low_latency_dispatch``; for example what is to run before the wait.

    Returns:
        As ``low_latency_dispatch``.

    Raises:
        EpUsageError: as ``low_latency_dispatch``, or ``pending`` is no pending dispatch of this
            buffer. One that was used before fails when the program runs.
    """
    op = "low_latency_dispatch_done"
    check_pending(op, buffer, pending, PendingDispatch)
    stats = check_stats(buffer, stats)
    token = pending.token if after is None else order_token(op, after)
    if buffer.backend == "reference":
        (counts,) = _half_arrays(op, buffer, (pending.routed.counts,))
        stats = _low_latency_reference.add_stats(stats, counts)
        return dataclasses.replace(pending.routed, stats=stats)
    operands = (pending.x, pending.topk_idx, pending.topk_weights, pending.ticket, stats, token)
    x, topk_idx, topk_weights, ticket, stats, token = _half_arrays(op, buffer, operands)
    tokens, weights, counts, num_dropped, recv_rows, stats, token = (
        _low_latency_primitives.dispatch_done(
            pending.layout, pending.padded, x, topk_idx, topk_weights, ticket, stats, token
        )
    )
    results = (tokens, weights, counts, num_dropped, recv_rows, topk_idx, stats, token)
    return _routed(pending.layout, pending.padded, results)


def low_latency_combine_start(
    buffer: Buffer, y: jax.Array, routed: LowLatencyRouted, *, after: Any = None
) -> PendingCombine:
    """The sending half of ``low_latency_combine``; see ``low_latency_dispatch_start``.

    Args:
        buffer, y, routed, after: as in ``low_latency_combine``.

    Returns:
        What ``low_latency_combine_done`` takes.

    Raises:
        EpUsageError: as ``low_latency_combine``.
    """
    op = "low_latency_combine_start"
    facts = check_combine(op, buffer, y, routed)
    arrays = (*_combine_arrays(y, routed), order_token(op, after))
    y, weights, topk_idx, recv_rows, token = _half_arrays(op, buffer, arrays)
    operands = (y, weights, topk_idx, recv_rows)
    ticket = out = None
    if buffer.backend == "reference":
        out, token = _low_latency_reference.combine(facts, *operands, token)
        operands = (None,) * 4
    else:
        ticket, token = _low_latency_primitives.combine_start(facts, *operands, token)
    return PendingCombine(*operands, ticket=ticket, token=token, out=out, layout=facts)


def low_latency_combine_done(
    buffer: Buffer, pending: PendingCombine, *, after: Any = None
) -> jax.Array:
    """The receiving half of ``low_latency_combine``.

    Args:
        buffer: the Buffer of the start.
        pending: the start's result; each is used once.
        after: as in ``low_latency_dispatch``.

    Returns:
        ``[T, H]`` in the config's dtype, this rank's tokens.

    Raises:
        EpUsageError: as ``low_latency_dispatch_done``.
    """
    token = None if after is None else order_token("low_latency_combine_done", after)
    out, _ = combine_done_in_turn(buffer, pending, token)
    return out


def combine_done_in_turn(
    buffer: Buffer, pending: PendingCombine, token: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """``low_latency_combine_done`` behind an order token, None for its start's, and one of its own.

    Not exported, as ``combine_in_turn``.
    """
    op = "low_latency_combine_done"
    check_pending(op, buffer, pending, PendingCombine)
    token = pending.token if token is None else token
    if buffer.backend == "reference":
        return _half_arrays(op, buffer, (pending.out, token))
    operands = (
        *(pending.y, pending.weights, pending.topk_idx, pending.recv_rows),
        *(pending.ticket, token),
    )
    return _low_latency_primitives.combine_done(pending.layout, *_half_arrays(op, buffer, operands))


def order_after(
    array: jax.Array, after: LowLatencyRouted | PendingDispatch | PendingCombine
) -> jax.Array:
    """The same values, which XLA cannot use before ``after`` is there.

    It puts a computation that shares no data with a start behind it, so that it runs while the rows
    are on their way: ``shared(order_after(x, pending))``, and ``after=`` at the done. Costs one
    elementwise operation that keeps every bit. Differentiable in ``array``. On the reference
    backend, whose starts do everything at once, it changes nothing.

    Args:
        array: floating.
        after: a start's result, or a dispatch's.

    Raises:
        EpUsageError: ``after`` is something else, or ``array`` is not floating.
    """
    if not isinstance(after, (LowLatencyRouted, PendingDispatch, PendingCombine)):
        raise EpUsageError(
            f"order_after: after={after!r} is a {type(after).__name__}; pass a pending start or a "
            "LowLatencyRouted"
        )
    array = jnp.asarray(array)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise EpUsageError(f"order_after: array has dtype {array.dtype}; pass a floating array")
    return behind(array, jax.lax.stop_gradient(after.token))


def _fused_dispatch(buffer: Buffer, facts: RouteLayout, padded: bool, arrays) -> LowLatencyRouted:
    backend = _low_latency_reference if buffer.backend == "reference" else _low_latency_vjp
    return _routed(facts, padded, backend.dispatch(facts, padded, *arrays))


def _routed(facts: RouteLayout, padded: bool, results) -> LowLatencyRouted:
    tokens, weights, counts, num_dropped, recv_rows, topk_idx, stats, token = results
    if padded:
        blocks = facts.experts_per_rank, facts.capacity // facts.experts_per_rank
        tokens, weights = jax.tree.map(
            lambda rows: rows.reshape(*blocks, *rows.shape[1:]), (tokens, weights)
        )
    tokens, scales = tokens if isinstance(tokens, tuple) else (tokens, None)
    return LowLatencyRouted(
        tokens=tokens,
        weights=weights,
        counts=counts,
        num_dropped=num_dropped,
        handle=Handle(topk_idx=topk_idx, recv_rows=recv_rows, layout=facts),
        token=token,
        stats=stats,
        scales=scales,
    )


def _combine_arrays(y: jax.Array, routed: LowLatencyRouted):
    """Operands of combine, rows along one axis."""
    y, weights = jnp.asarray(y), jnp.asarray(routed.weights)
    y = y.reshape(math.prod(y.shape[:-1]), y.shape[-1])
    return y, weights.reshape(-1), routed.handle.topk_idx, routed.handle.recv_rows


def _cast_tree(buffer: Buffer, arrays):
    """Casts all arrays of a tree to one type of device variance."""
    leaves, structure = jax.tree.flatten(arrays)
    return structure.unflatten(cast_varying(buffer.axis_names, *leaves))


def _half_arrays(op: str, buffer: Buffer, arrays):
    """Operands of a half: as _cast_tree, and refusing transformations."""
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, arrays))
    leaves = cast_varying(buffer.axis_names, *leaves)
    return structure.unflatten(_low_latency_primitives.inference_only(op, *leaves))
