"""Whether results are right: compared on the devices with what numpy says they should be."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from . import workload
from .systems import Operations

# Of the largest number in x, after the longest chain.
TOLERANCES = {"float32": 1e-5, "float16": 0.02, "bfloat16": 0.1}

_SPLIT = PartitionSpec(workload.AXIS)


class Truth:
    """What every system must make of a workload; each process looks at its own ranks.

    Attributes:
        load: the workload.
        mesh: its devices.
        args: x, topk_idx and topk_weights, split over the mesh, and the int32 0 of chains.
    """

    def __init__(self, load: workload.Workload, mesh: Mesh):
        self.load, self.mesh = load, mesh
        split, whole = (NamedSharding(mesh, spec) for spec in (_SPLIT, PartitionSpec()))
        inputs = (load.inputs.x, load.inputs.topk_idx, load.inputs.topk_weights)
        self.args = (
            *(jax.device_put(array, split) for array in inputs),
            jax.device_put(np.int32(0), whole),
        )
        sources, group_sizes = workload.expected_sources(load)
        self._sources = jax.device_put(sources.reshape(-1), split)
        self._group_sizes = group_sizes.reshape(-1)
        self._everything = jax.device_put(load.inputs.x, whole)

    def check_dispatch(self, name: str, ops: Operations, off: float = 0.0) -> None:
        """Checks one dispatch.

        Raises:
            AssertionError: it does not give the rows, up to ``off``, and group
                sizes of the routing.
        """

        def program(x, topk_idx, topk_weights):
            sent = ops.dispatch(x, topk_idx, topk_weights)
            return ops.rows(sent), sent.group_sizes

        sharded = jax.shard_map(program, mesh=self.mesh, in_specs=_SPLIT, out_specs=_SPLIT)
        self.check_rows(name, *jax.jit(sharded)(*self.args[:3]), off)

    def check_rows(
        self, name: str, rows: jax.Array, group_sizes: jax.Array, off: float = 0.0
    ) -> None:
        """Checks expert-major rows ``[R * capacity, H]``, up to ``off``, and group sizes ``[E]``.

        Raises:
            AssertionError: they are others.
        """
        wrong = _wrong_rows(self.mesh, off)(rows, self._sources, self._everything)
        by_rank = {
            shard.index[0].start or 0: int(np.asarray(shard.data)[0])
            for shard in wrong.addressable_shards
        }
        if any(by_rank.values()):
            raise AssertionError(
                f"{name} does not dispatch the expected rows: so many are wrong, by rank: {by_rank}"
            )
        for shard in jnp.asarray(group_sizes).addressable_shards:
            if not np.array_equal(np.asarray(shard.data), self._group_sizes[shard.index]):
                raise AssertionError(f"{name} does not return the expected group sizes")

    def check_sums(self, name: str, result: jax.Array) -> None:
        """Checks that a chain returned x.

        Raises:
            AssertionError: it did not.
        """
        tolerance = TOLERANCES[self.load.case.dtype]
        wrong, error = (
            np.asarray(number) for number in _wrong_sums(result, self.args[0], tolerance)
        )
        if wrong:
            raise AssertionError(
                f"{name}: {wrong} elements are wrong, by {error} at most, of which {tolerance} "
                "times the largest is allowed"
            )


@functools.cache
def _wrong_rows(mesh: Mesh, off: float):
    """``(rows, sources, everything) -> [R]``: how many of a rank's rows are not the sources'.

    Elements may be off by that share of themselves, or of a 4096th of their row's largest.
    """

    def count(rows, sources, everything):
        expected = everything[jnp.maximum(sources, 0)]
        if off:
            rows, expected = rows.astype(jnp.float32), expected.astype(jnp.float32)
            size = jnp.abs(expected)
            size = jnp.maximum(size, jnp.max(size, axis=1, keepdims=True) / 4096)
            same = jnp.all(jnp.abs(rows - expected) <= off * size, axis=1)
        else:
            same = jnp.all(rows == expected, axis=1)
        return jnp.sum((sources >= 0) & ~same, dtype=jnp.int32)[None]

    specs = (_SPLIT, _SPLIT, PartitionSpec())
    return jax.jit(jax.shard_map(count, mesh=mesh, in_specs=specs, out_specs=_SPLIT))


@jax.jit
def _wrong_sums(result: jax.Array, x: jax.Array, tolerance: float) -> tuple[jax.Array, jax.Array]:
    """How many elements are wrong, NaNs among them (which a maximum over devices may lose)."""
    result, x = result.astype(jnp.float32), x.astype(jnp.float32)
    error = jnp.abs(result - x)
    within = error <= tolerance * jnp.max(jnp.abs(x))
    return jnp.sum(~within, dtype=jnp.int32), jnp.max(error)
