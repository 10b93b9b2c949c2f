"""XLA treats the calls as functions: unused ones go, equal ones become one, chains stay."""

import collections
import re

import cases
import jax
import jax.numpy as jnp
import numpy as np
import programs

import jax_ep

CASE = cases.Case(name="pure", T=5, H=16, K=2, E=8, R=4)


def compile_and_run(buffer, program, rng):
    """Returns the compiled program's custom calls and its result on fresh inputs."""
    inputs = cases.make_inputs(CASE, rng)
    arguments = (inputs.x, inputs.topk_idx, inputs.topk_weights)
    compiled = jax.jit(programs.sharded(buffer, program)).lower(*arguments).compile()
    calls = re.findall(r'custom_call_target="(jax_ep_\w+)"', compiled.as_text())
    return collections.Counter(calls), jax.block_until_ready(compiled(*arguments)), inputs


def test_unused_calls_disappear(rng):
    with programs.make_buffer(CASE, "native") as buffer:

        def program(x, topk_idx, topk_weights):
            routed = jax_ep.dispatch(buffer, x, topk_idx, topk_weights)
            jax_ep.combine(buffer, routed.tokens, routed)
            jax_ep.dispatch(buffer, 2 * x, topk_idx, topk_weights)
            return routed.tokens

        calls, _, _ = compile_and_run(buffer, program, rng)
    assert calls == {"jax_ep_dispatch": 1}


def test_equal_calls_become_one(rng):
    with programs.make_buffer(CASE, "native") as buffer:

        def program(x, topk_idx, topk_weights):
            total = jnp.zeros_like(x)
            for _ in range(3):
                routed = jax_ep.dispatch(buffer, x, topk_idx, topk_weights)
                total += jax_ep.combine(buffer, routed.tokens, routed)
            return total

        calls, out, inputs = compile_and_run(buffer, program, rng)
    assert calls == {"jax_ep_dispatch": 1, "jax_ep_combine": 1}
    expected = 3 * inputs.x * inputs.topk_weights.sum(1, keepdims=True)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-4)


def test_equal_calls_on_two_buffers_stay_two(rng):
    with (
        programs.make_buffer(CASE, "native") as buffer,
        programs.make_buffer(CASE, "native") as other,
    ):

        def program(x, topk_idx, topk_weights):
            routed = jax_ep.dispatch(buffer, x, topk_idx, topk_weights)
            again = jax_ep.dispatch(other, x, topk_idx, topk_weights)
            return routed.tokens - again.tokens

        calls, difference, _ = compile_and_run(buffer, program, rng)
    assert calls == {"jax_ep_dispatch": 2}
    assert not np.asarray(difference).any()


def test_a_chain_of_calls_is_kept(rng):
    """Timing loops rely on it: calls that depend on each other are all made."""
    with programs.make_buffer(CASE, "native") as buffer:

        def program(x, topk_idx, topk_weights):
            for _ in range(4):
                routed = jax_ep.dispatch(buffer, x, topk_idx, topk_weights)
                x = jax_ep.combine(buffer, routed.tokens, routed)
            return x

        calls, out, inputs = compile_and_run(buffer, program, rng)
    assert calls == {"jax_ep_dispatch": 4, "jax_ep_combine": 4}
    expected = inputs.x * inputs.topk_weights.sum(1, keepdims=True) ** 4
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-3)
