"""With and without shard_map's check of device variance; parameters that ranks share."""

import dataclasses

import cases
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from jax.sharding import PartitionSpec

import jax_ep

CASE = cases.Case(name="vma", T=5, H=16, K=2, E=8, R=4)
SLOTS = dataclasses.replace(CASE, name="vma_slots", expand=False)
P = PartitionSpec


@pytest.mark.parametrize("case", [CASE, SLOTS], ids=lambda case: case.name)
@pytest.mark.parametrize("check_vma", [True, False])
def test_shared_parameters_get_summed_gradients(backend, rng, check_vma, case):
    """A scale that is the same on every rank, before dispatch, after it, and as weights."""
    inputs = cases.make_inputs(CASE, rng)
    scale = rng.uniform(0.5, 1.5, 3).astype(np.float32)

    with programs.make_buffer(CASE, backend) as buffer:

        def layer(x, topk_idx, topk_weights, scale):
            weights = topk_weights * scale[2]
            routed = programs.dispatch(buffer, case, x * scale[0], topk_idx, weights)
            rows = programs.expert_rows(routed)
            return jax_ep.combine(buffer, jnp.sin(rows) * scale[1], routed)

        rows = P("expert")
        run = programs.sharded(buffer, layer, in_specs=(rows, rows, rows, P()), check_vma=check_vma)

        def loss(scale):
            return jnp.sum(run(inputs.x, inputs.topk_idx, inputs.topk_weights, scale) ** 2)

        value, gradient = jax.block_until_ready(jax.jit(jax.value_and_grad(loss))(scale))

    def dense(scale):
        weights = (inputs.topk_weights * scale[2]).sum(1, keepdims=True)
        return jnp.sum((weights * jnp.sin(inputs.x * scale[0]) * scale[1]) ** 2)

    expected_value, expected = jax.value_and_grad(dense)(scale)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    np.testing.assert_allclose(gradient, expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("backend", "check_vma"), [("reference", True), ("native", True), ("native", False)]
)
def test_arguments_that_ranks_share(backend, rng, check_vma):
    """Every rank dispatches the same rows: x, topk_idx and topk_weights are not split at all."""
    x = rng.normal(size=(CASE.T, CASE.H)).astype(np.float32)
    topk_idx = np.argsort(rng.random((CASE.T, CASE.E)))[:, : CASE.K].astype(np.int32)
    topk_weights = rng.random((CASE.T, CASE.K)).astype(np.float32)
    with programs.make_buffer(CASE, backend) as buffer:

        def layer(x, topk_idx, topk_weights):
            routed = jax_ep.dispatch(buffer, x, topk_idx, topk_weights)
            return jax_ep.combine(buffer, jnp.sin(routed.tokens), routed)

        run = programs.sharded(buffer, layer, in_specs=P(), check_vma=check_vma)

        def loss(x, topk_weights):
            out = run(x, topk_idx, topk_weights)
            return jnp.sum(out**2), out

        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        (_, out), gradients = jax.block_until_ready(step(x, topk_weights))

    def dense(x, topk_weights):
        once = topk_weights.sum(1, keepdims=True) * jnp.sin(x)
        return CASE.R * jnp.sum(once**2), once

    (_, once), expected = jax.value_and_grad(dense, argnums=(0, 1), has_aux=True)(x, topk_weights)
    np.testing.assert_allclose(out, np.tile(once, (CASE.R, 1)), rtol=0, atol=1e-5)
    for seen, truth in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(seen, truth, rtol=0, atol=1e-4)


@pytest.mark.parametrize("expand", [True, False])
def test_results_vary_over_the_expert_axis(backend, expand):
    """Returning them as if all ranks had the same is refused by shard_map."""
    with programs.make_buffer(CASE, backend) as buffer:

        def layer(x, topk_idx, topk_weights):
            routed = jax_ep.dispatch(buffer, x, topk_idx, topk_weights, expand=expand)
            for leaf in jax.tree.leaves(routed):
                assert "expert" in jax.typeof(leaf).manual_axis_type.varying
            return jax_ep.combine(buffer, programs.expert_rows(routed), routed)

        shapes = (
            jax.ShapeDtypeStruct((CASE.T, CASE.H), jnp.float32),
            jax.ShapeDtypeStruct((CASE.T, CASE.K), jnp.int32),
            jax.ShapeDtypeStruct((CASE.T, CASE.K), jnp.float32),
        )
        run = programs.sharded(buffer, layer, in_specs=P(), out_specs=P())
        with pytest.raises(ValueError, match="out_specs"):
            jax.jit(run).trace(*shapes)
