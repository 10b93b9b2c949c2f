"""What XLA makes of the operations: the expected custom calls, no collectives, no copies."""

import collections
import dataclasses
import re

import cases
import jax
import jax.numpy as jnp
import ll_check
import programs
import pytest

import jax_ep
from jax_ep import _native

# Sizes that no other array of these programs has, so that a shape tells whose array it is.
CASE = cases.Case(name="hlo", T=7, H=48, K=3, E=8, R=4, load=1.9)
SLOTS = dataclasses.replace(CASE, name="hlo_slots", expand=False)
SHAPES = (
    jax.ShapeDtypeStruct((CASE.R * CASE.T, CASE.H), jnp.float32),
    jax.ShapeDtypeStruct((CASE.R * CASE.T, CASE.K), jnp.int32),
    jax.ShapeDtypeStruct((CASE.R * CASE.T, CASE.K), jnp.float32),
)
BOTH = pytest.mark.parametrize("case", [CASE, SLOTS], ids=lambda case: case.name)
COLLECTIVES = r"\b(all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)"


def forward(buffer, case=CASE):
    def program(x, topk_idx, topk_weights):
        routed = programs.dispatch(buffer, case, x, topk_idx, topk_weights)
        return jax_ep.combine(buffer, jnp.tanh(programs.expert_rows(routed)), routed)

    return programs.sharded(buffer, program)


def compiled_text(function):
    return jax.jit(function).lower(*SHAPES).compile().as_text()


def custom_calls(text):
    return collections.Counter(re.findall(r'custom_call_target="(jax_ep_\w+)"', text))


def copies_of_rows(text):
    """Instructions named copy or transpose whose result has one row of H elements per something."""
    shape = rf"f32\[\d+,{CASE.H}\]\S*"
    return re.findall(rf"= {shape} (?:copy|transpose)\(.*", text)


@BOTH
def test_native_forward_is_two_calls_and_nothing_else(case):
    with programs.make_buffer(CASE, "native") as buffer:
        text = compiled_text(forward(buffer, case))
    assert custom_calls(text) == {"jax_ep_dispatch": 1, "jax_ep_combine": 1}
    assert not re.findall(COLLECTIVES, text)
    assert not copies_of_rows(text)
    assert "custom_call_has_side_effect=true" not in text


def test_copies_would_be_found():
    """The pattern above meets a real copy in a program that must make one."""

    def program(x):
        return x, jax.lax.optimization_barrier(x.T).T

    x = jax.ShapeDtypeStruct((CASE.R * CASE.T, CASE.H), jnp.float32)
    text = jax.jit(program).lower(x).compile().as_text()
    assert copies_of_rows(text)


@BOTH
def test_native_backward_calls(case):
    def loss(x, topk_idx, topk_weights):
        return jnp.sum(forward(buffer, case)(x, topk_idx, topk_weights) ** 2)

    with programs.make_buffer(CASE, "native") as buffer:
        text = compiled_text(jax.value_and_grad(loss, argnums=(0, 2)))
    # Two forward; combine's gradient, and dispatch's, which is an unweighted combine.
    expected = {"jax_ep_dispatch": 1, "jax_ep_combine": 2, "jax_ep_combine_grad": 1}
    assert custom_calls(text) == expected
    assert not re.findall(r"\b(all-to-all|all-gather|collective-permute)", text)


def test_reference_makes_no_custom_calls_of_ours():
    with programs.make_buffer(CASE, "reference") as buffer:
        text = compiled_text(forward(buffer))
    assert not custom_calls(text)
    assert re.findall(COLLECTIVES, text)


@pytest.mark.parametrize("differentiated", [False, True])
def test_no_effects(backend, differentiated):
    with programs.make_buffer(CASE, backend) as buffer:
        function = forward(buffer)
        if differentiated:
            function = jax.grad(lambda *arguments: jnp.sum(forward(buffer)(*arguments)))
        assert not jax.make_jaxpr(function)(*SHAPES).effects


def in_both_modes(high, low):
    """Every operation that has a target, gradients and halves included."""

    def program(x, topk_idx, topk_weights):
        def whole(x, topk_weights):
            routed = programs.dispatch(high, CASE, x, topk_idx, topk_weights)
            x = jax_ep.combine(high, routed.tokens, routed)
            routed = ll_check.dispatch(low, CASE, "padded", x, topk_idx, topk_weights)
            return jax_ep.low_latency_combine(low, routed.tokens, routed)

        out, pull = jax.vjp(whole, x, topk_weights)
        along = jax_ep.dispatch(
            high, x, topk_weights=topk_weights, routing=jax_ep.route(high, topk_idx)
        )
        halved = ll_check.split_dispatch(low, CASE, "padded", out, topk_idx, topk_weights)
        float8 = ll_check.dispatch(
            *(low, CASE, "padded", out, topk_idx, topk_weights),
            quantize="float8_e4m3fn",
            after=halved,
        )
        last = ll_check.split_combine(low, halved.tokens, halved)
        return last, pull(out), along.tokens, float8.scales

    return programs.sharded(high, program, check_vma=False)


def test_all_targets_are_those_of_the_buffers_module(monkeypatch):
    """Two modules of a platform have targets of other names, which a program must not mix."""
    monkeypatch.setitem(_native._TARGET_SUFFIXES, "cpu", "_elsewhere")
    with programs.make_buffer(CASE, "native") as high, ll_check.make_buffer(CASE, "native") as low:
        text = jax.jit(in_both_modes(high, low)).lower(*SHAPES).as_text()
    found = set(re.findall(r"@(jax_ep_\w+)\(", text))
    assert len(found) == 13, found
    assert all(name.endswith("_elsewhere") for name in found), found
