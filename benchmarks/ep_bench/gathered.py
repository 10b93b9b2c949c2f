"""Transport with ``lax.all_gather`` and ``lax.psum_scatter``: every rank sees every token.

Every token is a message to every rank, so J is R * T; only the experts that live on the rank are
kept, closed up to ``fanout`` places, since summing K places of which most are empty takes longer.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from .rows import add_rows, put
from .workload import AXIS, Sizes


@functools.partial(jax.tree_util.register_dataclass, data_fields=("fan",), meta_fields=())
@dataclasses.dataclass(frozen=True)
class Route:
    """``fan [J, K]``, int32: each entry's place among those its token has on this rank, or -1."""

    fan: jax.Array


def route(sizes: Sizes, topk_idx: jax.Array, topk_weights: jax.Array):
    """Gathers all entries; returns a Route, and this rank's experts and weights ``[J, fanout]``."""
    entries = jnp.concatenate([topk_idx, lax.bitcast_convert_type(topk_weights, jnp.int32)], axis=1)
    entries = lax.all_gather(entries, AXIS, tiled=True)
    first_expert = lax.axis_index(AXIS) * sizes.experts_per_rank
    expert = entries[:, : sizes.K] - first_expert
    here = (expert >= 0) & (expert < sizes.experts_per_rank)
    fan = jnp.cumsum(here, axis=1, dtype=jnp.int32) - here
    message = lax.broadcasted_iota(jnp.int32, fan.shape, 0)
    num_entries = fan.shape[0] * sizes.fanout
    at = jnp.where(here, message * sizes.fanout + fan, num_entries)
    experts = put(num_entries, at, expert, -1).reshape(-1, sizes.fanout)
    weights = put(num_entries, at, entries[:, sizes.K :], 0).reshape(-1, sizes.fanout)
    result = Route(fan=jnp.where(here, fan, -1))
    return result, experts, lax.bitcast_convert_type(weights, jnp.float32)


def send(sizes: Sizes, route: Route, values: jax.Array) -> jax.Array:
    """Takes ``[T, H]`` to every rank, ``[J, H]``."""
    return lax.all_gather(values, AXIS, tiled=True)


def collect(
    sizes: Sizes, route: Route, y: jax.Array, rows: jax.Array, weights: jax.Array | None
) -> jax.Array:
    """Sums ``[capacity, H]`` rows for each message, and messages for each token: ``[T, H]``."""
    return _sum_for_source(add_rows(y, rows, weights))


def collect_scalars(sizes: Sizes, route: Route, scalars: jax.Array) -> jax.Array:
    """Takes float32 ``[J, fanout]`` back to the entries they belong to, ``[T, K]``."""
    found = jnp.take_along_axis(scalars, jnp.maximum(route.fan, 0), axis=1)
    return _sum_for_source(jnp.where(route.fan >= 0, found, 0))


def _sum_for_source(array: jax.Array) -> jax.Array:
    return lax.psum_scatter(array, AXIS, scatter_dimension=0, tiled=True)
