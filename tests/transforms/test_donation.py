"""Donated inputs: their memory may become the outputs', the results stay right."""

import cases
import jax
import numpy as np
import oracle
import programs
from jax.sharding import NamedSharding, PartitionSpec

CASE = cases.Case(name="donation", T=6, H=16, K=2, E=8, R=4)


def test_donated_rows(backend, rng):
    with programs.make_buffer(CASE, backend) as buffer:
        layer = programs.sharded(buffer, programs.linear_moe(buffer, CASE))
        run = jax.jit(layer, donate_argnums=0)
        sharding = NamedSharding(buffer.mesh, PartitionSpec("expert"))
        for _ in range(5):
            inputs, matrices = cases.make_inputs(CASE, rng), programs.random_matrices(rng, CASE)
            rest = (inputs.topk_idx, inputs.topk_weights, matrices)
            x = jax.device_put(inputs.x, sharding)
            out = run(x, *rest)
            assert x.is_deleted()
            expected = oracle.dense_moe(inputs.x, *rest, np.zeros_like(inputs.x)).out
            np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)


def test_donated_from_step_to_step(rng):
    """Each step gives its input's memory away, with several steps in flight."""
    with programs.make_buffer(CASE, "native") as buffer:
        layer = programs.sharded(buffer, programs.linear_moe(buffer, CASE))
        run = jax.jit(layer, donate_argnums=0)
        sharding = NamedSharding(buffer.mesh, PartitionSpec("expert"))
        inputs, matrices = cases.make_inputs(CASE, rng), programs.random_matrices(rng, CASE)
        rest = (inputs.topk_idx, inputs.topk_weights, matrices)
        x, expected = jax.device_put(inputs.x, sharding), inputs.x
        for _ in range(10):
            x = run(x, *rest)
            expected = oracle.dense_moe(expected, *rest, np.zeros_like(inputs.x)).out
        scale = np.abs(expected).max()
        np.testing.assert_allclose(x / scale, expected / scale, rtol=0, atol=1e-4)
