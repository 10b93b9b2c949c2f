"""Dispatch and combine on ``jax.lax`` collectives, with gradients that only gather: the baselines.

The same work as ``jax_ep``'s: identical expert-major rows, and the same weighted sums. What they
need not do, they do not: inputs must name K distinct experts, nothing is checked, and rows past the
last group are left as they fall. Sizes are those of one rank inside ``jax.shard_map``. Left to JAX,
the gradients would scatter-add rows.
"""

import dataclasses
import functools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from .rows import place, take, take_or_zero
from .workload import Sizes


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("tokens", "weights", "group_sizes", "rows", "entry_of_row", "route"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class Sent:
    """Results of dispatch.

    Attributes:
        tokens: ``[capacity, H]``, expert-major.
        weights: float32 ``[J, fanout]``, of the entries of each message.
        group_sizes: int32 ``[E_l]``.
        rows: int32 ``[J, fanout]``, row of each entry, or -1.
        entry_of_row: int32 ``[capacity]``.
        route: the transport's.
    """

    tokens: jax.Array
    weights: jax.Array
    group_sizes: jax.Array
    rows: jax.Array
    entry_of_row: jax.Array
    route: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def dispatch(
    transport: ModuleType, sizes: Sizes, x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array
) -> Sent:
    """Sends x ``[T, H]`` to the experts in topk_idx ``[T, K]``, over the transport."""
    route, experts, weights = transport.route(sizes, topk_idx, topk_weights)
    rows, entry_of_row, group_sizes = place(experts, sizes.experts_per_rank, sizes.capacity)
    received = transport.send(sizes, route, x)
    return Sent(
        tokens=take(received, entry_of_row // sizes.fanout),
        weights=weights,
        group_sizes=group_sizes,
        rows=rows,
        entry_of_row=entry_of_row,
        route=route,
    )


def _dispatch_fwd(transport, sizes, x, topk_idx, topk_weights):
    sent = dispatch(transport, sizes, x, topk_idx, topk_weights)
    return sent, (sent.rows, sent.route)


def _dispatch_bwd(transport, sizes, residuals, cotangent):
    rows, route = residuals
    d_x = transport.collect(sizes, route, cotangent.tokens, rows, None)
    return d_x, None, transport.collect_scalars(sizes, route, cotangent.weights)


dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def combine(transport: ModuleType, sizes: Sizes, y: jax.Array, sent: Sent) -> jax.Array:
    """Sums y ``[capacity, H]`` times the weights for each token, ``[T, H]``; reads no tokens."""
    return transport.collect(sizes, sent.route, y, sent.rows, sent.weights)


def _combine_fwd(transport, sizes, y, sent):
    return combine(transport, sizes, y, sent), (y, dataclasses.replace(sent, tokens=None))


def _combine_bwd(transport, sizes, residuals, g):
    y, sent = residuals
    # Products by row take one pass over y; by message they would take one for each place of a fan.
    g_of_row = take(transport.send(sizes, sent.route, g), sent.entry_of_row // sizes.fanout)
    d_y = (take(sent.weights.reshape(-1), sent.entry_of_row)[:, None] * g_of_row).astype(y.dtype)
    products = jnp.sum(y.astype(jnp.float32) * g_of_row, axis=1)
    d_weights = take_or_zero(products, sent.rows)
    no_cotangent = jax.tree.map(lambda _: None, sent)
    return d_y, dataclasses.replace(no_cotangent, weights=d_weights)


combine.defvjp(_combine_fwd, _combine_bwd)
