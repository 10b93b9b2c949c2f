"""Gradients of the native operations.

Dispatch and combine are each other's transposes: the gradient of dispatch brings rows' cotangents
back with combine, the gradient of combine sends tokens' cotangents out along the saved route.
Neither routes anew.
"""

import functools

import jax

from . import _float8, _primitives
from .routed import RouteLayout
from .routing import RoutingGroup


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def dispatch(layout: RouteLayout, x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array):
    """As ``_primitives.dispatch``; gradients reach x and topk_weights."""
    return _primitives.dispatch(layout, x, topk_idx, topk_weights)


def _dispatch_fwd(layout, x, topk_idx, topk_weights):
    results = _primitives.dispatch(layout, x, topk_idx, topk_weights)
    *_, sanitised_idx, recv_rows, _ = results
    return results, (x[:0], sanitised_idx, recv_rows)


def _dispatch_bwd(layout, residuals, cotangents):
    no_rows, topk_idx, recv_rows = residuals
    d_tokens, d_weights, *_ = cotangents
    d_tokens = _float8.row_cotangent(layout.float8, d_tokens, no_rows)
    d_x, d_topk_weights = _primitives.combine_with_scalars(
        layout, d_tokens, d_weights, topk_idx, recv_rows
    )
    return d_x, None, d_topk_weights


dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def dispatch_routed(
    layout: RouteLayout,
    x: jax.Array,
    topk_idx: jax.Array,
    row_index: jax.Array,
    counts: jax.Array,
    topk_weights: jax.Array,
):
    """As ``_primitives.dispatch_routed``; gradients reach x and topk_weights."""
    return _primitives.dispatch_routed(layout, x, topk_idx, row_index, counts, topk_weights)


def _dispatch_routed_fwd(layout, x, topk_idx, row_index, counts, topk_weights):
    results = _primitives.dispatch_routed(layout, x, topk_idx, row_index, counts, topk_weights)
    *_, recv_rows, _ = results
    return results, (x[:0], topk_idx, recv_rows)


def _dispatch_routed_bwd(layout, residuals, cotangents):
    d_x, _, d_topk_weights = _dispatch_bwd(layout, residuals, cotangents)
    return d_x, None, None, None, d_topk_weights


dispatch_routed.defvjp(_dispatch_routed_fwd, _dispatch_routed_bwd)


def route(group: RoutingGroup, topk_idx: jax.Array, ticket: jax.Array):
    """As ``_primitives.route``; its integers have no gradients."""
    return _primitives.route(group, jax.lax.stop_gradient(topk_idx), ticket)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def combine(
    layout: RouteLayout, y: jax.Array, weights: jax.Array, topk_idx: jax.Array, recv_rows: jax.Array
) -> jax.Array:
    """As ``_primitives.combine``; gradients reach y and weights."""
    return _primitives.combine(layout, y, weights, topk_idx, recv_rows)


def _combine_fwd(layout, y, weights, topk_idx, recv_rows):
    out = _primitives.combine(layout, y, weights, topk_idx, recv_rows)
    return out, (y, weights, topk_idx, recv_rows)


def _combine_bwd(layout, residuals, g):
    y, weights, topk_idx, recv_rows = residuals
    d_y, d_weights = _primitives.combine_grad(layout, g, topk_idx, recv_rows, weights, y)
    return d_y, d_weights, None, None


combine.defvjp(_combine_fwd, _combine_bwd)
