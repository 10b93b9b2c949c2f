"""Transport with ``lax.ragged_all_to_all``: every message at its place, none padded. GPUs only.

A token is sent once to each rank that needs it, as in ``padded``; what arrives is by source rank,
then token. XLA:CPU has no such collective.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from .rows import add_rows, count_before, put, take, take_or_zero
from .workload import AXIS, Sizes


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("tokens", "places", "entries", "outward", "homeward"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class Route:
    """What the source knows, and the four arguments ``[R]`` of a collective in each direction.

    Attributes:
        tokens: int32 ``[messages]``, the token of each message sent; 0 in unused places.
        places: int32 ``[T, R]``, place of each token's message to each rank, or -1.
        entries: int32 ``[T, K]``, place of (token, k) in the flattened ``[messages, fanout]``.
        outward, homeward: input offsets, send sizes, output offsets, receive sizes.
    """

    tokens: jax.Array
    places: jax.Array
    entries: jax.Array
    outward: tuple[jax.Array, ...]
    homeward: tuple[jax.Array, ...]


def route(sizes: Sizes, topk_idx: jax.Array, topk_weights: jax.Array):
    """Orders the messages by destination and sends what they are for.

    Returns:
        A Route, and of what arrives: experts and weights ``[J, fanout]``.
    """
    owner = topk_idx // sizes.experts_per_rank
    needed = jnp.any(owner[:, :, None] == jnp.arange(sizes.R), axis=1)  # [T, R]
    counts = jnp.sum(needed, axis=0, dtype=jnp.int32)
    outward, homeward = _offsets(counts)
    places = outward[0] + count_before(needed)
    token = lax.broadcasted_iota(jnp.int32, places.shape, 0)
    tokens = put(sizes.messages, jnp.where(needed, places, sizes.messages), token, 0)

    earlier = jnp.tril(jnp.ones((sizes.K, sizes.K), bool), -1)
    fan = jnp.sum((owner[:, :, None] == owner[:, None, :]) & earlier, axis=2)  # [T, K]
    entries = jnp.take_along_axis(places, owner, axis=1) * sizes.fanout + fan
    num_entries = sizes.messages * sizes.fanout
    experts = put(num_entries, entries, topk_idx % sizes.experts_per_rank, -1)
    weights = put(num_entries, entries, lax.bitcast_convert_type(topk_weights, jnp.int32), 0)
    sent = jnp.stack([array.reshape(sizes.messages, -1) for array in (experts, weights)], axis=1)
    nothing = jnp.zeros_like(sent).at[:, 0].set(-1)
    received = _exchange(sent, nothing, outward)
    result = Route(
        tokens=tokens,
        places=jnp.where(needed, places, -1),
        entries=entries,
        outward=outward,
        homeward=homeward,
    )
    return result, received[:, 0], lax.bitcast_convert_type(received[:, 1], jnp.float32)


def send(sizes: Sizes, route: Route, values: jax.Array) -> jax.Array:
    """Takes ``[T, H]`` to where the tokens go, ``[J, H]``."""
    sent = take(values, route.tokens)
    return _exchange(sent, jnp.zeros_like(sent), route.outward)


def collect(
    sizes: Sizes, route: Route, y: jax.Array, rows: jax.Array, weights: jax.Array | None
) -> jax.Array:
    """Sums ``[capacity, H]`` rows for each message, and messages for each token: ``[T, H]``."""
    sums = add_rows(y, rows, weights)
    return add_rows(_exchange(sums, jnp.zeros_like(sums), route.homeward), route.places, None)


def collect_scalars(sizes: Sizes, route: Route, scalars: jax.Array) -> jax.Array:
    """Takes float32 ``[J, fanout]`` back to the entries they belong to, ``[T, K]``."""
    received = _exchange(scalars, jnp.zeros_like(scalars), route.homeward)
    return take_or_zero(received.reshape(-1), route.entries)


def _offsets(counts: jax.Array) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Arguments of the collective outward and homeward, from this rank's counts by destination."""
    here = lax.axis_index(AXIS)
    by_pair = lax.all_gather(counts, AXIS)  # [source, destination]
    at_source = jnp.cumsum(by_pair, axis=1, dtype=jnp.int32) - by_pair
    at_destination = jnp.cumsum(by_pair, axis=0, dtype=jnp.int32) - by_pair
    outward = (at_source[here], by_pair[here], at_destination[here], by_pair[:, here])
    homeward = (at_destination[:, here], by_pair[:, here], at_source[:, here], by_pair[here])
    return outward, homeward


def _exchange(array: jax.Array, into: jax.Array, places: tuple[jax.Array, ...]) -> jax.Array:
    return lax.ragged_all_to_all(array, into, *places, axis_name=AXIS)
