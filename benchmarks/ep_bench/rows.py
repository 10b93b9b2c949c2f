"""What the baselines do on one rank: put messages into expert-major rows, and sum rows.

A message is one token's row on its way to one rank; J messages reach a rank, and each feeds up to
``fanout`` rows. All routing is done on integers with scatters and prefix sums, and whole rows are
only ever gathered: on XLA:CPU a scatter of 1,000 rows takes 5 times as long as a gather, and an
argsort of 8,000 keys 50 times as long as a scatter of them.
"""

import jax
import jax.numpy as jnp
from jax import lax

SCAN_BLOCK = 32


def take(array: jax.Array, index: jax.Array) -> jax.Array:
    """Rows of array at indices that are in bounds."""
    return array.at[index].get(mode="promise_in_bounds")


def take_or_zero(array: jax.Array, index: jax.Array) -> jax.Array:
    """As take; an index of -1 gives zeros."""
    found = take(array, jnp.maximum(index, 0))
    here = (index >= 0).reshape(index.shape + (1,) * (found.ndim - index.ndim))
    return jnp.where(here, found, 0)


def put(size: int, at: jax.Array, values: jax.Array, fill) -> jax.Array:
    """``[size]`` of fill with values at distinct places; a place of ``size`` writes nothing."""
    array = jnp.full(size, fill, values.dtype)
    return array.at[at.reshape(-1)].set(values.reshape(-1), mode="drop", unique_indices=True)


def count_before(flags: jax.Array) -> jax.Array:
    """Of boolean ``[N, M]``, the number of true values above each place; int32.

    Sums inside blocks are a small matrix product, exact in float32. jnp.cumsum along this axis
    takes 1.2 to 4 times as long, an associative scan as long but 4 times as long to compile.
    """
    num_rows, num_columns = flags.shape
    num_blocks = -(-num_rows // SCAN_BLOCK)
    flags = jnp.pad(flags, ((0, num_blocks * SCAN_BLOCK - num_rows), (0, 0)))
    blocks = flags.reshape(num_blocks, SCAN_BLOCK, num_columns).astype(jnp.float32)
    above = jnp.tril(jnp.ones((SCAN_BLOCK, SCAN_BLOCK), jnp.float32), -1)
    inside = jnp.einsum("ij,njm->nim", above, blocks)
    totals = blocks.sum(axis=1)
    blocks_before = jnp.cumsum(totals, axis=0) - totals
    counts = (inside + blocks_before[:, None]).reshape(-1, num_columns)
    return counts[:num_rows].astype(jnp.int32)


def place(expert: jax.Array, num_experts: int, capacity: int):
    """Gives every entry its row: by expert, then message (which are by source rank, then token).

    Args:
        expert: int32 ``[J, fanout]``, this rank's experts that each message is for; -1 for none.
        num_experts: experts on this rank.
        capacity: rows.

    Returns:
        rows int32 ``[J, fanout]`` (-1 for none), entry_of_row int32 ``[capacity]`` (of the
        flattened ``[J, fanout]``, 0 past the last row) and group_sizes int32 ``[num_experts]``.
    """
    named = jnp.any(expert[:, :, None] == jnp.arange(num_experts), axis=1)  # [J, experts]
    before = count_before(named)
    group_sizes = before[-1] + named[-1]
    first_row = jnp.cumsum(group_sizes) - group_sizes
    known = jnp.maximum(expert, 0)
    rows = take(first_row, known) + jnp.take_along_axis(before, known, axis=1)
    rows = jnp.where(expert >= 0, rows, -1)
    entry = lax.iota(jnp.int32, expert.size)
    entry_of_row = put(capacity, jnp.where(rows < 0, capacity, rows), entry, 0)
    return rows, entry_of_row, group_sizes


def add_rows(y: jax.Array, rows: jax.Array, weights: jax.Array | None) -> jax.Array:
    """Sums of ``weights * y[rows]`` over the places of ``rows [J, fanout]``; ``[J, H]``, y's dtype.

    One gather for each place of the fan, which XLA fuses into one loop; gathering ``[J, fanout,
    H]`` and reducing it takes 4 to 5 times as long.
    """
    total = 0
    for place_in_fan in range(rows.shape[1]):
        term = take_or_zero(y, rows[:, place_in_fan]).astype(jnp.float32)
        total += term if weights is None else term * weights[:, place_in_fan, None]
    return total.astype(y.dtype)
