"""Gradients to x, topk_weights, routed.weights and the experts, against numbers and the oracle."""

import dataclasses

import case_check
import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import programs
import pytest
from jax.test_util import check_grads

import jax_ep

CASE = cases.Case(name="grad", T=5, H=16, K=3, E=8, R=4, routing="some_nobody")
DROPS = dataclasses.replace(CASE, name="grad_drops", load=0.7, alignment=2)
SLOTS = dataclasses.replace(CASE, name="grad_slots", expand=False, alignment=2)
SLOTS_DROPS = dataclasses.replace(DROPS, name="grad_slots_drops", expand=False)


@pytest.fixture(scope="module", params=["reference", "native"])
def buffer(request):
    with programs.make_buffer(CASE, request.param) as made:
        yield made


@pytest.mark.parametrize("case", [CASE, SLOTS], ids=lambda case: case.name)
def test_linear_layer_against_dense_gradients(buffer, rng, case):
    inputs, matrices = cases.make_inputs(case, rng), programs.random_matrices(rng, case)
    g = rng.normal(size=inputs.x.shape).astype(np.float32)
    layer = programs.sharded(buffer, programs.linear_moe(buffer, case))

    @jax.jit
    def gradients(x, topk_weights, matrices):
        def loss(x, topk_weights, matrices):
            return jnp.sum(g * layer(x, inputs.topk_idx, topk_weights, matrices))

        return jax.grad(loss, argnums=(0, 1, 2))(x, topk_weights, matrices)

    got = gradients(inputs.x, inputs.topk_weights, matrices)
    dense = oracle.dense_moe(inputs.x, inputs.topk_idx, inputs.topk_weights, matrices, g)
    assert np.abs(dense.d_topk_weights).max() > 0.1
    for seen, expected in zip(
        got, (dense.d_x, dense.d_topk_weights, dense.d_matrices), strict=True
    ):
        np.testing.assert_allclose(seen, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", [CASE, DROPS, SLOTS, SLOTS_DROPS], ids=lambda case: case.name)
def test_check_grads(buffer, rng, case):
    """Finite differences through a layer that is not linear, with and without dropped rows."""
    inputs, matrices = cases.make_inputs(case, rng), programs.random_matrices(rng, case)

    def layer(x, topk_idx, topk_weights, matrices):
        routed = programs.dispatch(buffer, case, x, topk_idx, topk_weights)
        rows = programs.expert_rows(routed)
        h = jnp.sin(jax.lax.ragged_dot(rows, matrices, routed.group_sizes))
        edited = dataclasses.replace(routed, weights=jnp.tanh(routed.weights))
        return jax_ep.combine(buffer, h * routed.weights[:, None], edited)

    run = programs.sharded(buffer, layer)

    @jax.jit
    def function(x, topk_weights, matrices):
        return jnp.sin(run(x, inputs.topk_idx, topk_weights, matrices))

    arguments = (inputs.x, inputs.topk_weights, matrices)
    check_grads(function, arguments, order=1, modes=["rev"], atol=2e-2, rtol=2e-3, eps=1e-3)


def test_dropped_rows_get_no_gradient(buffer, rng):
    case = dataclasses.replace(DROPS, load=0.3)
    inputs = cases.make_inputs(case, rng)
    truth = case_check.truth_of(case, inputs)
    assert truth.num_dropped.sum() > 0

    def layer(x, topk_idx, topk_weights):
        routed = programs.dispatch(buffer, case, x, topk_idx, topk_weights)
        return jax_ep.combine(buffer, routed.tokens + 1, routed)

    run = programs.sharded(buffer, layer)

    @jax.jit
    def gradient(topk_weights):
        return jax.grad(lambda w: jnp.sum(run(inputs.x, inputs.topk_idx, w)))(topk_weights)

    kept = np.zeros(truth.topk_idx.shape, bool)
    for _, _, source, token, k in truth.entries():
        kept[source, token, k] = True
    seen = np.asarray(gradient(inputs.topk_weights)).reshape(kept.shape)
    assert not seen[~kept].any()
    assert (seen[kept] != 0).all()


def test_slots_used_as_they_are(buffer, rng):
    """A slot's cotangent counts once, however many of its token's experts are on the rank."""
    inputs = cases.make_inputs(CASE, rng)
    scale = rng.normal(size=(CASE.R, CASE.R * CASE.T, CASE.H)).astype(np.float32)

    def layer(scale, x, topk_idx, topk_weights):
        return scale * programs.dispatch(buffer, SLOTS_DROPS, x, topk_idx, topk_weights).tokens

    run = programs.sharded(buffer, layer)
    flat = scale.reshape(-1, CASE.H)

    @jax.jit
    def gradient(x):
        return jax.grad(lambda x: jnp.sum(run(flat, x, inputs.topk_idx, inputs.topk_weights)))(x)

    truth = case_check.truth_of(SLOTS_DROPS, inputs)
    expected, _ = oracle.slot_gradients(truth, scale, np.zeros(truth.weights.shape))
    seen = np.asarray(gradient(inputs.x)).reshape(expected.shape)
    np.testing.assert_allclose(seen, expected, rtol=0, atol=1e-5)


def test_router_learns(buffer, rng):
    """The gradient goes through top-k weights into the router, the classic one to lose."""
    inputs = cases.make_inputs(CASE, rng)
    router = rng.normal(size=(CASE.H, CASE.E)).astype(np.float32)

    def weights_of(x, router):
        return jax.lax.top_k(jax.nn.softmax(x @ router), CASE.K)

    def layer(x, router):
        weights, idx = weights_of(x, router)
        routed = jax_ep.dispatch(buffer, x, idx.astype(jnp.int32), weights)
        return jax_ep.combine(buffer, jnp.tanh(routed.tokens), routed)

    spec = jax.sharding.PartitionSpec
    run = programs.sharded(buffer, layer, in_specs=(spec("expert"), spec()))

    def dense(x, router):
        weights, _ = weights_of(x, router)
        return weights.sum(1, keepdims=True) * jnp.tanh(x)

    def gradient(function):
        return jax.jit(jax.grad(lambda r: jnp.sum(function(inputs.x, r) ** 2)))(router)

    expected = gradient(dense)
    assert np.abs(expected).max() > 1e-2
    np.testing.assert_allclose(gradient(run), expected, rtol=0, atol=1e-4)


def test_only_some_outputs_used(buffer, rng):
    """Cotangents that JAX leaves out arrive as zeros."""
    inputs = cases.make_inputs(CASE, rng)

    def tokens_only(x, topk_idx, topk_weights):
        return jax_ep.dispatch(buffer, x, topk_idx, topk_weights).tokens

    def weights_only(x, topk_idx, topk_weights):
        return jax_ep.dispatch(buffer, x, topk_idx, topk_weights).weights

    def gradients(function):
        run = programs.sharded(buffer, function)

        def loss(x, w):
            return jnp.sum(run(x, inputs.topk_idx, w))

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(inputs.x, inputs.topk_weights)

    valid = (inputs.topk_idx >= 0).astype(np.float32)
    d_x, d_weights = gradients(tokens_only)
    np.testing.assert_array_equal(d_x, np.broadcast_to(valid.sum(1)[:, None], d_x.shape))
    assert not np.asarray(d_weights).any()
    d_x, d_weights = gradients(weights_only)
    assert not np.asarray(d_x).any()
    np.testing.assert_array_equal(d_weights, valid)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_keep_the_dtype(rng, dtype):
    case = dataclasses.replace(CASE, dtype=dtype)
    inputs = cases.make_inputs(case, rng)
    with programs.make_buffer(case, "native") as narrow:

        def layer(x, topk_idx, topk_weights):
            routed = jax_ep.dispatch(narrow, x, topk_idx, topk_weights)
            return jax_ep.combine(narrow, routed.tokens, routed)

        run = programs.sharded(narrow, layer)

        def loss(x, topk_weights):
            return jnp.sum(run(x, inputs.topk_idx, topk_weights).astype(jnp.float32))

        gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))(inputs.x, inputs.topk_weights)
        d_x, d_weights = jax.block_until_ready(gradients)
    assert d_x.dtype == jnp.dtype(dtype)
    assert d_weights.dtype == jnp.float32
    valid = inputs.topk_idx >= 0
    expected = np.broadcast_to((inputs.topk_weights * valid).sum(1)[:, None], d_x.shape)
    np.testing.assert_allclose(d_x.astype(np.float32), expected, rtol=2e-2)
