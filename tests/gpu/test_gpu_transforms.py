"""Gradients, scan, checkpoint and vmap on GPUs; bits as on CPU where XLA rounds alike."""

import dataclasses

import cases
import gpu_world
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import programs
from jax.sharding import PartitionSpec
from jax.test_util import check_grads

import jax_ep

CASE = cases.Case(name="layers", T=33, H=64, K=3, E=8, R=2, chunk=12, routing="some_nobody")
SMALL = cases.Case(name="grad", T=5, H=16, K=3, E=8, R=2, routing="some_nobody")
NUM_LAYERS = 4


def test_check_grads(num_gpus, rng):
    """Finite differences through a layer that is not linear."""
    case = gpu_world.on_ranks(SMALL, num_gpus)
    inputs, matrices = cases.make_inputs(case, rng), programs.random_matrices(rng, case)

    def layer(x, topk_idx, topk_weights, matrices):
        routed = programs.dispatch(buffer, case, x, topk_idx, topk_weights)
        h = jnp.sin(jax.lax.ragged_dot(routed.tokens, matrices, routed.group_sizes))
        edited = dataclasses.replace(routed, weights=jnp.tanh(routed.weights))
        return jax_ep.combine(buffer, h * routed.weights[:, None], edited)

    with gpu_world.make_buffer(case) as buffer, jax.default_matmul_precision("highest"):
        run = programs.sharded(buffer, layer)
        x, topk_idx, weights, experts = gpu_world.put(
            buffer, inputs.x, inputs.topk_idx, inputs.topk_weights, matrices
        )

        @jax.jit
        def function(x, topk_weights, matrices):
            return jnp.sin(run(x, topk_idx, topk_weights, matrices))

        check_grads(
            function, (x, weights, experts), order=1, modes=["rev"], atol=2e-2, rtol=2e-2, eps=1e-2
        )


def test_linear_layer_against_dense_gradients(num_gpus, rng):
    case = gpu_world.on_ranks(CASE, num_gpus)
    inputs, matrices = cases.make_inputs(case, rng), programs.random_matrices(rng, case)
    g = cases.random_rows(rng, inputs.x.shape, case.dtype)
    arguments = (inputs.x, inputs.topk_idx, inputs.topk_weights, matrices)
    dense = oracle.dense_moe(*arguments, g)

    @jax.jit
    def gradients(x, topk_idx, topk_weights, matrices, g):
        def out(x, topk_weights, matrices):
            return layer(x, topk_idx, topk_weights, matrices)

        primal, pull = jax.vjp(out, x, topk_weights, matrices)
        return primal, *pull(g)

    with gpu_world.make_buffer(case) as buffer, jax.default_matmul_precision("highest"):
        layer = programs.sharded(buffer, programs.linear_moe(buffer, case))
        got = jax.block_until_ready(gradients(*gpu_world.put(buffer, *arguments, g)))
    expected = (dense.out, dense.d_x, dense.d_topk_weights, dense.d_matrices)
    for seen, truth in zip(got, expected, strict=True):
        np.testing.assert_allclose(seen, truth, rtol=0, atol=1e-4 * max(1, np.abs(truth).max()))


def stack_of_layers(buffer, case):
    """Layers as a scan of checkpointed bodies, and the gradients that a cotangent pulls back."""

    def layer(x, topk_idx, topk_weights):
        return x + gpu_world.leaky_layer(buffer, case, x, topk_idx, topk_weights)

    def stack(x, topk_idx, topk_weights):
        def body(x, per_layer):
            return jax.checkpoint(layer)(x, *per_layer), None

        return jax.lax.scan(body, x, (topk_idx, topk_weights))[0]

    def with_gradients(x, topk_idx, topk_weights, g):
        out, pull = jax.vjp(lambda x, w: stack(x, topk_idx, w), x, topk_weights)
        d_x, d_weights = pull(g)
        return {"out": out, "d_x": d_x, "d_weights": d_weights}

    rows, stacked = PartitionSpec("expert"), PartitionSpec(None, "expert")
    specs = {
        "in_specs": (rows, stacked, stacked, rows),
        "out_specs": {"out": rows, "d_x": rows, "d_weights": stacked},
    }
    return jax.jit(programs.sharded(buffer, with_gradients, **specs))


def test_scan_over_checkpointed_layers_has_the_bits_of_the_cpu(num_gpus, rng):
    case = gpu_world.on_ranks(CASE, num_gpus)
    layers = [cases.make_inputs(case, rng) for _ in range(NUM_LAYERS)]
    arguments = (
        layers[0].x,
        np.stack([layer.topk_idx for layer in layers]),
        np.stack([layer.topk_weights for layer in layers]),
        cases.random_rows(rng, layers[0].x.shape, case.dtype),
    )
    results = {}
    for platform in ("cuda", "cpu"):
        with gpu_world.make_buffer(case, platform) as buffer:
            results[platform] = jax.block_until_ready(stack_of_layers(buffer, case)(*arguments))
            assert buffer.check() is None
    gpu_world.assert_same_bits(results["cuda"], results["cpu"])
    assert np.isfinite(np.asarray(results["cuda"]["out"])).all()


def test_two_runs_have_the_same_bits(num_gpus, rng):
    case = dataclasses.replace(gpu_world.on_ranks(CASE, num_gpus), dtype="bfloat16", T=500)
    inputs = cases.make_inputs(case, rng)
    with gpu_world.make_buffer(case) as buffer:

        def layer(x, topk_idx, topk_weights):
            return gpu_world.leaky_layer(buffer, case, x, topk_idx, topk_weights)

        run = jax.jit(programs.sharded(buffer, layer))
        arguments = gpu_world.put(buffer, inputs.x, inputs.topk_idx, inputs.topk_weights)
        first = {"out": np.asarray(run(*arguments))}
        for _ in range(5):
            gpu_world.assert_same_bits({"out": run(*arguments)}, first, "again:")


def test_vmap_is_sequential_and_right(num_gpus, rng):
    case = gpu_world.on_ranks(SMALL, num_gpus)
    batch = [cases.make_inputs(case, rng) for _ in range(3)]
    stacked = [np.stack([getattr(i, name) for i in batch]) for name in ("x", "topk_idx")]
    stacked.append(np.stack([i.topk_weights for i in batch]))

    with gpu_world.make_buffer(case) as buffer:

        def layer(x, topk_idx, topk_weights):
            return gpu_world.leaky_layer(buffer, case, x, topk_idx, topk_weights)

        spec = PartitionSpec(None, "expert")
        run = programs.sharded(buffer, jax.vmap(layer), in_specs=spec, out_specs=spec)
        out = np.asarray(jax.jit(run)(*stacked))
    np.testing.assert_allclose(
        out, jax.vmap(gpu_world.dense_leaky_layer)(*stacked), rtol=0, atol=1e-5
    )
