"""What one does in ``jax.numpy`` where one rank holds all experts: argsort, take, weighted sum."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from .workload import Sizes


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("tokens", "weights", "group_sizes", "order"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class Sorted:
    """Results of dispatch.

    Attributes:
        tokens: ``[capacity, H]``, expert-major.
        weights: float32 ``[T, K]``.
        group_sizes: int32 ``[E]``.
        order: int32 ``[T * K]``, the entry (t, k) in each row.
    """

    tokens: jax.Array
    weights: jax.Array
    group_sizes: jax.Array
    order: jax.Array


def dispatch(sizes: Sizes, x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array) -> Sorted:
    """Sorts the entries by expert and takes their tokens."""
    experts = topk_idx.reshape(-1)
    # The sum gives the order the experts' type: jax 0.10 does not see that it varies over ranks.
    order = jnp.argsort(experts, stable=True) + jnp.zeros_like(experts)
    spare = jnp.pad(order, (0, sizes.capacity - order.size))
    return Sorted(
        tokens=x[spare // sizes.K],
        weights=topk_weights,
        group_sizes=jnp.zeros(sizes.E, jnp.int32).at[experts].add(1),
        order=order,
    )


def combine(sizes: Sizes, y: jax.Array, routed: Sorted) -> jax.Array:
    """Takes the rows back into the tokens' order and sums them, weighted, in float32."""
    places = jnp.arange(routed.order.size, dtype=jnp.int32)
    row_of_entry = jnp.zeros_like(routed.order).at[routed.order].set(places, unique_indices=True)
    rows = y[row_of_entry].reshape(sizes.T, sizes.K, sizes.H)
    total = jnp.sum(rows.astype(jnp.float32) * routed.weights[:, :, None], axis=1)
    return total.astype(y.dtype)
