"""The low-latency operations on ``jax.lax`` collectives: ``_reference`` with padded rows.

Signatures are those of ``_low_latency_vjp``. Tokens order nothing here: XLA orders its own
collectives.
"""

import dataclasses

import jax
import jax.numpy as jnp

from . import _float8, _reference
from .low_latency_routed import LowLatencyStats
from .routed import RouteLayout


def dispatch(
    layout: RouteLayout,
    padded: bool,
    x: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array,
    stats: LowLatencyStats | None,
    token: jax.Array,
):
    """As ``_low_latency_primitives.dispatch``; rows past the counts are zero."""
    num_slots = layout.num_ranks * topk_idx.shape[0]
    if padded:
        per_token = min(topk_idx.shape[1], layout.experts_per_rank)
        compact = dataclasses.replace(layout, capacity=max(1, num_slots * per_token))
    else:
        compact = layout
    compact = dataclasses.replace(compact, float8=None)  # rows are spread first
    tokens, weights, counts, _, num_dropped, topk_idx, recv_rows, _ = _reference.dispatch(
        compact, x, topk_idx, topk_weights
    )
    if padded:
        tokens, weights, recv_rows = _spread(num_slots, tokens, weights, counts, recv_rows)
    tokens = _float8.through(layout.float8, tokens)
    stats = add_stats(stats, counts)
    return tokens, weights, counts, num_dropped, recv_rows, topk_idx, stats, jnp.zeros_like(token)


def combine(
    layout: RouteLayout,
    y: jax.Array,
    weights: jax.Array,
    topk_idx: jax.Array,
    recv_rows: jax.Array,
    token: jax.Array,
):
    """As ``_low_latency_primitives.combine``."""
    return _reference.combine(layout, y, weights, topk_idx, recv_rows), jnp.zeros_like(token)


def _spread(num_slots: int, tokens, weights, counts, recv_rows):
    """Moves experts that lie one after another to blocks of ``num_slots`` rows.

    Args:
        num_slots: R * T.
        tokens: ``[capacity, H]``.
        weights: float32 ``[capacity]``.
        counts: int32 ``[E_l]``.
        recv_rows: int32 ``[R * T, K]``, compact row numbers.

    Returns:
        tokens ``[E_l * R * T, H]``, weights ``[E_l * R * T]``, recv_rows with padded row numbers.
    """
    ends = jnp.cumsum(counts)
    starts = ends - counts
    index = jnp.arange(num_slots)
    past_end = tokens.shape[0]
    source = jnp.where(index < counts[:, None], starts[:, None] + index, past_end).reshape(-1)
    tokens = tokens.at[source].get(mode="fill", fill_value=0)
    weights = weights.at[source].get(mode="fill", fill_value=0)
    expert = jnp.searchsorted(ends, recv_rows, side="right").astype(jnp.int32)
    padded_rows = expert * num_slots + recv_rows - starts.at[expert].get(mode="clip")
    return tokens, weights, jnp.where(recv_rows < 0, -1, padded_rows)


def add_stats(stats: LowLatencyStats | None, counts: jax.Array) -> LowLatencyStats | None:
    """The totals with one operation added; nothing here knows how long it waited."""
    if stats is None:
        return None
    return LowLatencyStats(stats.tokens_per_expert + counts, stats.waited_ns)
