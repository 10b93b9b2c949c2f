"""A scan over layers: one call site, many epochs, forward and backward."""

import dataclasses

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import programs
import pytest
from jax.sharding import PartitionSpec

CASE = cases.Case(name="scan", T=6, H=16, K=2, E=8, R=4, chunk=4)
SLOTS = dataclasses.replace(CASE, name="scan_slots", expand=False)
NUM_LAYERS = 5


def random_stack(rng):
    """Inputs whose routing and matrices differ from layer to layer."""
    x = cases.random_rows(rng, (CASE.R * CASE.T, CASE.H), CASE.dtype)
    layers = [cases.make_inputs(CASE, rng) for _ in range(NUM_LAYERS)]
    topk_idx = np.stack([layer.topk_idx for layer in layers])
    topk_weights = np.stack([layer.topk_weights for layer in layers])
    matrices = np.stack([programs.random_matrices(rng, CASE) for _ in layers])
    return x, topk_idx, topk_weights, matrices


def dense_stack(x, topk_idx, topk_weights, matrices, g):
    """Output and gradients of the stack, layer by layer with the oracle."""
    activations = [x]
    for layer in range(NUM_LAYERS):
        step = oracle.dense_moe(
            activations[-1], topk_idx[layer], topk_weights[layer], matrices[layer], np.zeros_like(x)
        )
        activations.append(step.out)
    d_weights, d_matrices = np.zeros(topk_weights.shape), np.zeros(matrices.shape)
    for layer in reversed(range(NUM_LAYERS)):
        step = oracle.dense_moe(
            activations[layer], topk_idx[layer], topk_weights[layer], matrices[layer], g
        )
        g, d_weights[layer], d_matrices[layer] = step.d_x, step.d_topk_weights, step.d_matrices
    return activations[-1], (g, d_weights, d_matrices)


def scanned(buffer, wrap=lambda layer: layer, case=CASE):
    """The stack as one scan inside shard_map; ``wrap`` may transform the layer."""
    layer = wrap(programs.linear_moe(buffer, case))

    def stack(x, topk_idx, topk_weights, matrices):
        def body(x, per_layer):
            return layer(x, *per_layer), None

        return jax.lax.scan(body, x, (topk_idx, topk_weights, matrices))[0]

    rows, stacked = PartitionSpec("expert"), PartitionSpec(None, "expert")
    return programs.sharded(buffer, stack, in_specs=(rows, stacked, stacked, stacked))


def value_and_gradients(stack, topk_idx, g):
    def loss(x, topk_weights, matrices):
        out = stack(x, topk_idx, topk_weights, matrices)
        return jnp.sum(g * out), out

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))


@pytest.mark.parametrize("case", [CASE, SLOTS], ids=lambda case: case.name)
def test_scan_over_layers(backend, rng, case):
    x, topk_idx, topk_weights, matrices = random_stack(rng)
    g = rng.normal(size=x.shape).astype(np.float32)
    expected_out, expected = dense_stack(x, topk_idx, topk_weights, matrices, g)
    with programs.make_buffer(CASE, backend) as buffer:
        run = value_and_gradients(scanned(buffer, case=case), topk_idx, g)
        for _ in range(3):
            (_, out), gradients = run(x, topk_weights, matrices)
            np.testing.assert_allclose(out, expected_out, rtol=0, atol=1e-4)
            for seen, truth in zip(gradients, expected, strict=True):
                np.testing.assert_allclose(seen, truth, rtol=0, atol=2e-4 * np.abs(truth).max())


def test_routed_as_carry(backend, rng):
    """A Routed may be a scan's carry: its static facts do not change."""
    inputs = cases.make_inputs(CASE, rng)
    with programs.make_buffer(CASE, backend) as buffer:

        def program(x, topk_idx, topk_weights):
            def body(routed, _):
                again = programs.dispatch(buffer, CASE, x, topk_idx, topk_weights)
                return again, routed.num_dropped + jnp.sum(routed.group_sizes)

            first = programs.dispatch(buffer, CASE, x, topk_idx, topk_weights)
            last, sizes = jax.lax.scan(body, first, length=3)
            return last.tokens - first.tokens, sizes

        run = jax.jit(programs.sharded(buffer, program))
        results = run(inputs.x, inputs.topk_idx, inputs.topk_weights)
        difference, sizes = jax.block_until_ready(results)
    assert not np.asarray(difference).any()
    assert np.asarray(sizes).reshape(CASE.R, 3).sum(0).tolist() == [CASE.R * CASE.T * CASE.K] * 3
