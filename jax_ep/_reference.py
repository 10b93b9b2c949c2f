"""Dispatch and combine on ``jax.lax`` collectives: what the operations mean, written to be read.

Runs on any platform and is differentiated by JAX itself, so the native backend's outputs and
gradients can be checked against it. Shapes are those of one rank inside ``jax.shard_map``: T
tokens, K experts per token, hidden size H, R ranks, E_l experts per rank, N = R * T * K entries
seen by a rank.
"""

import jax
import jax.numpy as jnp
from jax import lax

from . import _float8
from .routed import RouteLayout
from .routing import RoutingGroup


def dispatch(layout: RouteLayout, x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array):
    """Sends every token to the ranks that hold its experts.

    Args:
        layout: static facts of the call.
        x: ``[T, H]``.
        topk_idx: int32 ``[T, K]``.
        topk_weights: float32 ``[T, K]``.

    Returns:
        tokens ``[capacity, H]`` (``[R * T, H]`` when not expanded; with ``layout.float8`` perhaps a
        pair of values and scales), weights float32 ``[capacity]``, group_sizes and valid_sizes
        int32 ``[E_l]``, num_dropped int32 scalar, sanitised topk_idx int32 ``[T, K]``, recv_rows
        int32 ``[R * T, K]``, row_map int32 ``[capacity]`` (None when expanded).
    """
    num_tokens, num_experts_per_tok = topk_idx.shape
    num_slots = layout.num_ranks * num_tokens
    if num_tokens == 0:
        # XLA gathers no empty arrays: one token for no expert takes the place of none.
        x, topk_weights = _append_zero(x), _append_zero(topk_weights)
        topk_idx = _append_zero(topk_idx) - 1
    topk_idx = sanitise(topk_idx, layout.num_ranks * layout.experts_per_rank)
    # In float32 from here to the end of the expansion, so that the gradient of x is rounded once.
    all_x, all_idx, all_weights = (
        lax.all_gather(array, layout.axis_names, tiled=True)
        for array in (x.astype(jnp.float32), topk_idx, topk_weights)
    )
    first_expert = lax.axis_index(layout.axis_names) * layout.experts_per_rank
    rows, group_sizes, valid_sizes, num_dropped = _expert_major_rows(
        layout, (all_idx - first_expert).reshape(-1)
    )

    # entry_of_row inverts rows; rows without an entry point past the last entry, at a zero.
    num_entries = rows.shape[0]
    entry_of_row = jnp.full(layout.capacity, num_entries).at[_or_past_end(rows, layout.capacity)]
    entry_of_row = entry_of_row.set(jnp.arange(num_entries), mode="drop")
    slot_of_row = entry_of_row // num_experts_per_tok
    recv_rows = rows.reshape(all_idx.shape)[:num_slots]
    if layout.expand:
        tokens, row_map = _append_zero(all_x)[slot_of_row], None
    else:
        here = jnp.any(recv_rows >= 0, axis=1)
        tokens = jnp.where(here[:, None], all_x[:num_slots], 0)
        row_map = jnp.minimum(slot_of_row, num_slots).astype(jnp.int32)
    weights = _append_zero(all_weights.reshape(-1))[entry_of_row]
    sizes = (group_sizes, valid_sizes, num_dropped)
    topk_idx = topk_idx[:num_tokens]
    # A row's values and scales are the same whoever computes them: here those who received it.
    tokens = _float8.through(layout.float8, tokens.astype(x.dtype))
    return tokens, weights, *sizes, topk_idx, recv_rows, row_map


def dispatch_routed(
    layout: RouteLayout,
    x: jax.Array,
    topk_idx: jax.Array,
    row_index: jax.Array,
    counts: jax.Array,
    topk_weights: jax.Array,
):
    """As dispatch for a sanitised topk_idx, of which the rest of a Routing follows."""
    del row_index, counts
    return dispatch(layout, x, topk_idx, topk_weights)


def route(group: RoutingGroup, topk_idx: jax.Array, ticket: jax.Array):
    """Counts the rows of every rank for every expert.

    Args:
        group: static facts of the call.
        topk_idx: int32 ``[T, K]``.
        ticket: not used: on any platform the host reads the counts out of the results.

    Returns:
        sanitised topk_idx int32 ``[T, K]``; row_index int32 ``[T, K]``, the entry's place among
        those of this rank for its expert, -1 for none; counts int32 ``[R, E]``.
    """
    del ticket
    num_experts = group.num_ranks * group.experts_per_rank
    topk_idx = sanitise(topk_idx, num_experts)
    chosen = jax.nn.one_hot(topk_idx.reshape(-1), num_experts, dtype=jnp.int32)  # [T * K, E]
    before = jnp.cumsum(chosen, axis=0) - chosen
    row_index = jnp.sum(before * chosen, axis=1).reshape(topk_idx.shape)
    counts = lax.all_gather(jnp.sum(chosen, axis=0), group.axis_names)
    return topk_idx, jnp.where(topk_idx < 0, -1, row_index), counts


def combine(
    layout: RouteLayout, y: jax.Array, weights: jax.Array, topk_idx: jax.Array, recv_rows: jax.Array
) -> jax.Array:
    """Sums experts' rows: ``out[t] = sum over k of weights[row] * y[row]`` for the row of (t, k).

    Each rank sums the rows it holds of a token in float32, k ascending, and rounds once for the
    way; the token's rank begins with its own rows, which are not rounded, adds the others' sums in
    rank order in float32, and rounds once.

    Args:
        layout: static facts of the dispatch.
        y: ``[capacity, H]``.
        weights: float32 ``[capacity]``.
        topk_idx: int32 ``[T, K]``.
        recv_rows: int32 ``[R * T, K]``.

    Returns:
        ``[T, H]`` in y's dtype.
    """
    num_tokens = topk_idx.shape[0]
    if num_tokens == 0:
        return jnp.zeros_like(y, shape=(0, y.shape[1]))
    rank = lax.axis_index(layout.axis_names)
    peer = jnp.arange(layout.num_ranks)[:, None, None]
    y32 = y.astype(jnp.float32)

    nothing = jnp.zeros_like(y32, shape=(recv_rows.shape[0], y.shape[1]))
    sent = _add_weighted_rows(nothing, y32, weights, recv_rows).astype(y.dtype)
    received = lax.all_to_all(sent, layout.axis_names, split_axis=0, concat_axis=0, tiled=True)
    received = received.astype(jnp.float32).reshape(layout.num_ranks, num_tokens, y.shape[1])
    own_rows = lax.dynamic_slice_in_dim(recv_rows, rank * num_tokens, num_tokens)

    out = _add_weighted_rows(nothing[:num_tokens], y32, weights, own_rows)
    out = _add_in_order(out, jnp.where(peer != rank, received, 0))
    return out.astype(y.dtype)


def sanitise(topk_idx: jax.Array, num_experts: int) -> jax.Array:
    """Replaces experts outside [0, num_experts), and a token's repetitions of an expert, by -1."""
    in_range = (topk_idx >= 0) & (topk_idx < num_experts)
    k = jnp.arange(topk_idx.shape[1])
    earlier = k[None, :] < k[:, None]  # [K, K]: is the second k before the first
    same = topk_idx[:, :, None] == topk_idx[:, None, :]  # [T, K, K]
    repeats = jnp.any(same & earlier, axis=2)
    return jnp.where(in_range & ~repeats, topk_idx, -1)


def _expert_major_rows(layout: RouteLayout, expert: jax.Array):
    """Places entries expert by expert; inside an expert in the order given.

    Args:
        layout: static facts of the call.
        expert: ``[N]``, each entry's expert counted from this rank's first; those outside [0, E_l)
            are not its own.

    Returns:
        rows int32 ``[N]`` (-1: not here, or dropped), group_sizes, valid_sizes, num_dropped.
    """
    nobody = layout.experts_per_rank
    expert = jnp.where((expert >= 0) & (expert < nobody), expert, nobody)
    counts = jnp.zeros(nobody + 1, jnp.int32).at[expert].add(1)
    place = jnp.argsort(jnp.argsort(expert, stable=True))  # each entry's place in the sorted order
    index = place.astype(jnp.int32) - (jnp.cumsum(counts) - counts)[expert]

    alignment = layout.expert_alignment
    aligned = -(-counts // alignment) * alignment
    ends = jnp.cumsum(aligned)
    starts = ends - aligned
    rows = starts[expert] + index
    rows = jnp.where((expert < nobody) & (rows < layout.capacity), rows, -1)

    kept_start = jnp.minimum(starts, layout.capacity)
    group_sizes = jnp.minimum(ends, layout.capacity) - kept_start
    valid_sizes = jnp.minimum(starts + counts, layout.capacity) - kept_start
    num_dropped = jnp.sum((counts - valid_sizes)[:nobody])
    return rows, group_sizes[:nobody], valid_sizes[:nobody], num_dropped


def _add_weighted_rows(
    total: jax.Array, y32: jax.Array, weights: jax.Array, rows: jax.Array
) -> jax.Array:
    """Adds ``weights[row] * y32[row]`` for ``row = rows[:, k]``, k ascending; -1 adds nothing."""

    def add(total, rows_of_k):
        at = _or_past_end(rows_of_k, y32.shape[0])
        weight = weights.at[at].get(mode="fill", fill_value=0)
        return total + weight[:, None] * y32.at[at].get(mode="fill", fill_value=0), None

    return lax.scan(add, total, rows.T)[0]


def _add_in_order(total: jax.Array, terms: jax.Array) -> jax.Array:
    """Adds terms along their first axis one after another; a sum over an axis promises no order."""
    return lax.scan(lambda total, term: (total + term, None), total, terms)[0]


def _or_past_end(rows: jax.Array, end: int) -> jax.Array:
    """-1 would mean the last row to JAX's indexing; ``end`` is out of bounds."""
    return jnp.where(rows < 0, end, rows)


def _append_zero(array: jax.Array) -> jax.Array:
    return jnp.concatenate([array, jnp.zeros_like(array, shape=(1, *array.shape[1:]))])
