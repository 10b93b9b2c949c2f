"""Gradients of the fused native low-latency operations, as in ``_vjp``.

The token of ``after=`` goes through every operation. Its cotangent goes through the gradients the
other way, so operations that were ordered forwards are ordered in reverse backwards.
"""

import functools

import jax

from . import _float8
from . import _low_latency_primitives as primitives
from .low_latency_routed import LowLatencyStats
from .routed import RouteLayout


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def dispatch(
    layout: RouteLayout,
    padded: bool,
    x: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array,
    stats: LowLatencyStats | None,
    token: jax.Array,
):
    """As ``_low_latency_primitives.dispatch``; gradients reach x, topk_weights and token."""
    return primitives.dispatch(layout, padded, x, topk_idx, topk_weights, stats, token)


def _dispatch_fwd(layout, padded, x, topk_idx, topk_weights, stats, token):
    results = primitives.dispatch(layout, padded, x, topk_idx, topk_weights, stats, token)
    recv_rows, sanitised_idx = results[4:6]
    return results, (x[:0], sanitised_idx, recv_rows)


def _dispatch_bwd(layout, padded, residuals, cotangents):
    no_rows, topk_idx, recv_rows = residuals
    d_tokens, d_weights, *_, d_token = cotangents
    d_tokens = _float8.row_cotangent(layout.float8, d_tokens, no_rows)
    d_x, d_topk_weights, d_token = primitives.combine_with_scalars(
        layout, d_tokens, d_weights, topk_idx, recv_rows, d_token
    )
    return d_x, None, d_topk_weights, None, d_token


dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def combine(
    layout: RouteLayout,
    y: jax.Array,
    weights: jax.Array,
    topk_idx: jax.Array,
    recv_rows: jax.Array,
    token: jax.Array,
):
    """As ``_low_latency_primitives.combine``; gradients reach y, weights and token."""
    return primitives.combine(layout, y, weights, topk_idx, recv_rows, token)


def _combine_fwd(layout, y, weights, topk_idx, recv_rows, token):
    results = primitives.combine(layout, y, weights, topk_idx, recv_rows, token)
    return results, (y, weights, topk_idx, recv_rows)


def _combine_bwd(layout, residuals, cotangents):
    y, weights, topk_idx, recv_rows = residuals
    g, d_token = cotangents
    d_y, d_weights, d_token = primitives.combine_grad(
        layout, g, topk_idx, recv_rows, weights, y, d_token
    )
    return d_y, d_weights, None, None, d_token


combine.defvjp(_combine_fwd, _combine_bwd)
