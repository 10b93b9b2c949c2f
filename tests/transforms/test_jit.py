"""Under jit, without it, ahead of time, and with Routed crossing an inner jit."""

import cases
import jax
import numpy as np
import oracle
import programs
import pytest

import jax_ep

CASE = cases.Case(name="jit", T=5, H=16, K=2, E=8, R=4)


@pytest.fixture
def problem(backend, rng):
    """A buffer, the arguments of a linear layer on it, and what must come out."""
    inputs, matrices = cases.make_inputs(CASE, rng), programs.random_matrices(rng, CASE)
    arguments = (inputs.x, inputs.topk_idx, inputs.topk_weights, matrices)
    expected = oracle.dense_moe(*arguments, np.zeros_like(inputs.x)).out
    with programs.make_buffer(CASE, backend) as buffer:
        yield buffer, arguments, expected


def assert_out(out, expected):
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)


def test_ahead_of_time(problem):
    buffer, arguments, expected = problem
    layer = programs.sharded(buffer, programs.linear_moe(buffer, CASE))
    compiled = jax.jit(layer).lower(*arguments).compile()
    assert_out(compiled(*arguments), expected)


def test_without_jit(rng):
    """JAX runs shard_map's body operation by operation."""
    inputs = cases.make_inputs(CASE, rng)
    with programs.make_buffer(CASE, "native") as buffer:

        def program(x, topk_idx, topk_weights):
            routed = programs.dispatch(buffer, CASE, x, topk_idx, topk_weights)
            return jax_ep.combine(buffer, routed.tokens, routed)

        arguments = (inputs.x, inputs.topk_idx, inputs.topk_weights)
        out = jax.block_until_ready(programs.sharded(buffer, program)(*arguments))
    assert_out(out, inputs.x * inputs.topk_weights.sum(1, keepdims=True))


def test_routed_crosses_an_inner_jit(problem):
    buffer, arguments, expected = problem

    @jax.jit
    def send(x, topk_idx, topk_weights):
        return programs.dispatch(buffer, CASE, x, topk_idx, topk_weights)

    @jax.jit
    def work(routed, matrices):
        y = jax.lax.ragged_dot(routed.tokens, matrices, routed.group_sizes)
        return jax_ep.combine(buffer, y, routed)

    def layer(x, topk_idx, topk_weights, matrices):
        return work(send(x, topk_idx, topk_weights), matrices)

    assert_out(jax.jit(programs.sharded(buffer, layer))(*arguments), expected)


def test_routed_is_a_pytree_with_static_facts(problem):
    buffer, arguments, _ = problem
    found = []

    def layer(x, topk_idx, topk_weights, matrices):
        routed = programs.dispatch(buffer, CASE, x, topk_idx, topk_weights)
        found.append(jax.tree.structure(routed))
        leaves, structure = jax.tree.flatten(routed)
        again = jax.tree.unflatten(structure, leaves)
        assert again.handle.layout == routed.handle.layout
        assert all(hasattr(leaf, "dtype") for leaf in leaves)
        return again.tokens

    for _ in range(2):
        jax.jit(programs.sharded(buffer, lambda *a: layer(*a))).trace(*arguments)
    assert found[0] == found[1]
    assert hash(found[0]) == hash(found[1])
