"""Gradients, transformations, custom calls and refusals of dispatches that quantise."""

import collections
import re
import types

import cases
import jax
import jax.numpy as jnp
import ll_check
import numpy as np
import programs
import pytest
from float8_check import FORMATS, same_bits

import jax_ep

CASE = cases.Case(name="float8", T=6, H=144, K=3, E=8, R=4)
QUANTIZE = {"quantize": "float8_e4m3fn"}
ROWS = QUANTIZE | {"dequantize": True}
MODES = ("dispatch", "padded", "compact")
BOTH_MODES = pytest.mark.parametrize("mode", MODES)


def make_buffer(mode, backend, case=CASE):
    make = programs.make_buffer if mode == "dispatch" else ll_check.make_buffer
    return make(case, backend)


def send(buffer, mode, *arrays, **options):
    if mode == "dispatch":
        return jax_ep.dispatch(buffer, *arrays, **options)
    return jax_ep.low_latency_dispatch(buffer, *arrays, layout=mode, **options)


def bring_back(buffer, mode, y, routed):
    combine = jax_ep.combine if mode == "dispatch" else jax_ep.low_latency_combine
    return combine(buffer, y, routed)


def held_rows(routed):
    """Tokens, zero where they are unwritten."""
    return jnp.where(routed.weights[..., None] > 0, routed.tokens, 0)


def layer(buffer, mode, **options):
    """Experts that scale by a tanh; the loss's gradient reaches rows and weights."""

    def program(x, topk_idx, topk_weights):
        routed = send(buffer, mode, x, topk_idx, topk_weights, **options)
        return bring_back(buffer, mode, jnp.tanh(held_rows(routed)), routed)

    return program


GRADIENTS = [(b, f, m) for b in ("native", "window") for f in FORMATS for m in MODES]
GRADIENTS += [("reference", "power_of_two", "dispatch"), ("reference", "float32", "padded")]


@pytest.mark.table
@pytest.mark.parametrize(("backend", "scale_format", "mode"), GRADIENTS)
def test_gradient_of_rows_goes_straight_through(backend, scale_format, mode, rng):
    """The cotangents of x and of the weights are those of a dispatch that does not quantise."""
    inputs = cases.make_inputs(CASE, rng)
    arguments = inputs.x, inputs.topk_weights
    with make_buffer(mode, backend) as buffer:

        def gradients(seed, x, topk_idx, topk_weights, **options):
            def function(x, topk_weights):
                routed = send(buffer, mode, x, topk_idx, topk_weights, **options)
                return routed.tokens, routed.weights

            (tokens, weights), pull = jax.vjp(function, x, topk_weights)
            keys = jax.random.split(jax.random.key(seed[0]))
            held = weights > 0
            d_tokens = jax.random.normal(keys[0], tokens.shape, tokens.dtype)
            d_weights = jax.random.normal(keys[1], weights.shape)
            return pull((jnp.where(held[..., None], d_tokens, 0), jnp.where(held, d_weights, 0)))

        def program(*arrays):
            return gradients(*arrays), gradients(*arrays, **ROWS, scale_format=scale_format)

        seeds = rng.integers(2**31, size=CASE.R).astype(np.int32)
        run = jax.jit(programs.sharded(buffer, program))
        plain, quantised = run(seeds, inputs.x, inputs.topk_idx, inputs.topk_weights)
    for mine, theirs, like in zip(quantised, plain, arguments, strict=True):
        assert np.abs(np.asarray(mine)).max() > 0
        same_bits(mine, theirs, like.shape)


@BOTH_MODES
def test_training_steps(mode, rng):
    """Two layers in a scan, rematerialised: near the gradients of rows as they are, not equal."""
    inputs = cases.make_inputs(CASE, rng)
    with make_buffer(mode, "native") as buffer:

        def loss(x, topk_weights, topk_idx, **options):
            step = jax.checkpoint(layer(buffer, mode, **options))

            def stack(x, topk_idx, topk_weights):
                body = lambda x, _: (x + step(x, topk_idx, topk_weights), None)  # noqa: E731
                return jax.lax.scan(body, x, None, length=2)[0]

            return jnp.sum(programs.sharded(buffer, stack)(x, topk_idx, topk_weights) ** 2)

        both = [
            jax.jit(jax.grad(lambda *a, o=options: loss(*a, inputs.topk_idx, **o), argnums=(0, 1)))
            for options in ({}, ROWS)
        ]
        plain, quantised = [run(inputs.x, inputs.topk_weights) for run in both]
    for mine, theirs in zip(quantised, plain, strict=True):
        theirs = np.asarray(theirs)
        assert np.isfinite(mine).all()
        error = np.abs(mine - theirs).max() / np.abs(theirs).max()
        assert 1e-5 < error < 0.2


@BOTH_MODES
def test_pair_gives_a_gradient_to_weights_alone(backend, mode, rng):
    inputs = cases.make_inputs(CASE, rng)
    with make_buffer(mode, backend) as buffer:

        def weights(x, topk_idx, topk_weights):
            routed = send(buffer, mode, x, topk_idx, topk_weights, **QUANTIZE)
            return jnp.where(routed.weights > 0, routed.weights, 0) ** 2

        run = programs.sharded(buffer, weights)

        def loss(x, topk_weights):
            return jnp.sum(run(x, inputs.topk_idx, topk_weights))

        with pytest.raises(jax_ep.EpUsageError, match="dequantize=True"):
            jax.grad(loss)(inputs.x, inputs.topk_weights)
        gradient = jax.jit(jax.grad(loss, argnums=1))(inputs.x, inputs.topk_weights)
    np.testing.assert_allclose(gradient, 2 * inputs.topk_weights, rtol=1e-6)


def test_vmap(backend, rng):
    inputs = cases.make_inputs(CASE, rng)
    with make_buffer("dispatch", backend) as buffer:

        def program(x, topk_idx, topk_weights):
            batched = jax.vmap(
                lambda x: send(buffer, "dispatch", x, topk_idx, topk_weights, **ROWS)
            )
            pairs = jax.vmap(
                lambda x: send(buffer, "dispatch", x, topk_idx, topk_weights, **QUANTIZE).scales
            )
            both = jnp.stack([x, -2 * x])
            rows = batched(both).tokens
            return rows[0], rows[1], *pairs(both)

        run = jax.jit(programs.sharded(buffer, program))
        rows, doubled, scales, double_scales = run(inputs.x, inputs.topk_idx, inputs.topk_weights)
    np.testing.assert_array_equal(doubled, -2 * rows)
    expected = np.where(np.asarray(scales) == 1, 1, 2 * scales)
    np.testing.assert_array_equal(double_scales, expected)


@BOTH_MODES
@pytest.mark.parametrize("options", [QUANTIZE, ROWS], ids=["pair", "rows"])
def test_custom_calls(mode, options):
    """A dispatch is one call, which gives what it gives: nothing converts, no side effect."""
    with make_buffer(mode, "native") as buffer:

        def forward(x, topk_idx, topk_weights):
            routed = send(buffer, mode, x, topk_idx, topk_weights, **options)
            return (routed.tokens, routed.weights) + (
                (routed.scales,) * (routed.scales is not None)
            )

        text = compiled_text(programs.sharded(buffer, forward))
        prefix = "jax_ep_" if mode == "dispatch" else "jax_ep_ll_"
        assert custom_calls(text) == {f"{prefix}dispatch_float8": 1}
        assert "custom_call_has_side_effect=true" not in text
        assert not re.findall(rf"\[\d+,{CASE.H}\]\S* convert\(", text)
        if options is QUANTIZE:
            return

        def loss(*arrays):
            return jnp.sum(programs.sharded(buffer, layer(buffer, mode, **options))(*arrays))

        text = compiled_text(jax.value_and_grad(loss, argnums=(0, 2)))
        expected = {"dispatch_float8": 1, "combine": 2, "combine_grad": 1}
        assert custom_calls(text) == {prefix + name: n for name, n in expected.items()}


def test_custom_calls_of_halves():
    with make_buffer("padded", "native") as buffer:

        def program(*arrays):
            pending = jax_ep.low_latency_dispatch_start(buffer, *arrays, **QUANTIZE)
            routed = jax_ep.low_latency_dispatch_done(buffer, pending)
            return routed.tokens, routed.scales

        text = compiled_text(programs.sharded(buffer, program))
    name = "jax_ep_ll_dispatch_float8"
    assert custom_calls(text) == {f"{name}_start": 1, f"{name}_done": 1}


BAD = {
    "another type": ({"quantize": "float8_e5m2"}, "quantize='float8_e5m2'.*use 'float8_e4m3fn'"),
    "no type": ({"quantize": 8}, "quantize=8"),
    "a bool": ({"quantize": True}, "quantize=True"),
    "scale format": (QUANTIZE | {"scale_format": "e8m0"}, "scale_format='e8m0'.*'power_of_two'"),
    "dequantize": (QUANTIZE | {"dequantize": 1}, "dequantize=1 is a int"),
    "dequantize alone": ({"dequantize": True}, "without quantize"),
    "format alone": ({"scale_format": "power_of_two"}, "without quantize"),
}


@pytest.mark.parametrize("name", BAD)
@BOTH_MODES
def test_bad_arguments(backend, mode, name):
    options, message = BAD[name]
    with make_buffer(mode, backend) as buffer:
        with pytest.raises(jax_ep.EpUsageError, match=message):
            trace(buffer, mode, **options)
        trace(buffer, mode, quantize=jnp.float8_e4m3fn, dequantize=np.True_)


@BOTH_MODES
def test_a_backend_that_cannot_says_so(mode, monkeypatch):
    """Modules without the targets, as that for GPUs, refuse while JAX traces."""
    with make_buffer(mode, "native") as buffer:
        fake = types.SimpleNamespace(__name__="a module without them", registrations=dict)
        monkeypatch.setattr(buffer, "_native", fake)
        try:
            with pytest.raises(jax_ep.EpUsageError, match=r"not offered.*backend='reference'"):
                trace(buffer, mode, **QUANTIZE)
        finally:
            monkeypatch.undo()


def trace(buffer, mode, **options):
    program = programs.sharded(
        buffer, lambda *arrays: send(buffer, mode, *arrays, **options).weights
    )
    return jax.eval_shape(program, *shapes())


def shapes():
    tokens = CASE.R * CASE.T
    return (
        jax.ShapeDtypeStruct((tokens, CASE.H), jnp.float32),
        jax.ShapeDtypeStruct((tokens, CASE.K), jnp.int32),
        jax.ShapeDtypeStruct((tokens, CASE.K), jnp.float32),
    )


def compiled_text(function):
    return jax.jit(function).lower(*shapes()).compile().as_text()


def custom_calls(text):
    return collections.Counter(re.findall(r'custom_call_target="(jax_ep_\w+)"', text))
