"""Transport with capacity-padded ``lax.all_to_all``: a number of slots for each pair of ranks.

A token takes one slot for each rank, however many of its experts live there. Sends are built, and
sums read, one peer at a time, because XLA:CPU cuts all_to_all's operand and result into one buffer
for each peer.

What lost, in processor time of a round trip at (T=128, K=8, E=64, R=8), (T=1024, K=2, E=16, R=8)
and (T=1024, K=2, E=16, R=2): one slot for each (token, expert), weighted and summed at the source,
1.6, 1.25 and 1.5 times as long; operands and results of all_to_all as one array, 2.7 times at the
first and 1.5 at the third. Reading each peer's buffer by a select instead of a gather from all of
them made no difference.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from .rows import add_rows, count_before, put, take, take_or_zero
from .workload import AXIS, Sizes


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("tokens", "slots", "entries"), meta_fields=()
)
@dataclasses.dataclass(frozen=True)
class Route:
    """What the source knows.

    Attributes:
        tokens: int32 ``[R, slots]``, the token in each slot; 0 in unused ones.
        slots: int32 ``[T, R]``, each token's slot to each rank, or -1.
        entries: int32 ``[T, K]``, place of (token, k) in the flattened ``[R, slots, fanout]``.
    """

    tokens: jax.Array
    slots: jax.Array
    entries: jax.Array


def route(sizes: Sizes, topk_idx: jax.Array, topk_weights: jax.Array):
    """Fills the slots and sends what they hold.

    Returns:
        A Route, and of what arrives: experts and weights ``[J, fanout]``.
    """
    num_slots = sizes.R * sizes.slots
    owner = topk_idx // sizes.experts_per_rank
    needed = jnp.any(owner[:, :, None] == jnp.arange(sizes.R), axis=1)  # [T, R]
    slots = count_before(needed)
    token = lax.broadcasted_iota(jnp.int32, slots.shape, 0)
    place = jnp.arange(sizes.R) * sizes.slots + slots
    tokens = put(num_slots, jnp.where(needed, place, num_slots), token, 0)

    earlier = jnp.tril(jnp.ones((sizes.K, sizes.K), bool), -1)
    fan = jnp.sum((owner[:, :, None] == owner[:, None, :]) & earlier, axis=2)  # [T, K]
    entries = jnp.take_along_axis(place, owner, axis=1) * sizes.fanout + fan
    num_entries = num_slots * sizes.fanout
    experts = put(num_entries, entries, topk_idx % sizes.experts_per_rank, -1)
    weights = put(num_entries, entries, lax.bitcast_convert_type(topk_weights, jnp.int32), 0)
    sent = jnp.stack([experts.reshape(num_slots, -1), weights.reshape(num_slots, -1)], axis=1)
    received = _exchange(sent)
    result = Route(
        tokens=tokens.reshape(sizes.R, -1), slots=jnp.where(needed, slots, -1), entries=entries
    )
    return result, received[:, 0], lax.bitcast_convert_type(received[:, 1], jnp.float32)


def send(sizes: Sizes, route: Route, values: jax.Array) -> jax.Array:
    """Takes ``[T, H]`` to where the tokens go, ``[J, H]``."""
    sent = jnp.stack([take(values, route.tokens[peer]) for peer in range(sizes.R)])
    return _exchange(sent).reshape(-1, values.shape[1])


def collect(
    sizes: Sizes, route: Route, y: jax.Array, rows: jax.Array, weights: jax.Array | None
) -> jax.Array:
    """Sums ``[capacity, H]`` rows for each message, and messages for each token: ``[T, H]``."""
    rows = rows.reshape(sizes.R, sizes.slots, -1)
    if weights is not None:
        weights = weights.reshape(rows.shape)
    sums = [
        add_rows(y, rows[peer], None if weights is None else weights[peer])
        for peer in range(sizes.R)
    ]
    received = _exchange(jnp.stack(sums))
    terms = (
        take_or_zero(received[peer], route.slots[:, peer]).astype(jnp.float32)
        for peer in range(sizes.R)
    )
    return sum(terms).astype(y.dtype)


def collect_scalars(sizes: Sizes, route: Route, scalars: jax.Array) -> jax.Array:
    """Takes float32 ``[J, fanout]`` back to the entries they belong to, ``[T, K]``."""
    return take(_exchange(scalars).reshape(-1), route.entries)


def _exchange(array: jax.Array) -> jax.Array:
    """Cuts the first axis into one block for each peer, and swaps them."""
    return lax.all_to_all(array, AXIS, split_axis=0, concat_axis=0, tiled=True)
