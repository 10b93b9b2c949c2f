"""jit, grad, scan, checkpoint, vmap and check_vma on the fused low-latency operations."""

import dataclasses
import re

import cases
import jax
import jax.numpy as jnp
import ll_check
import numpy as np
import oracle
import programs
import pytest
from jax.sharding import PartitionSpec
from jax.test_util import check_grads
from ll_check import TINY

import jax_ep

LAYERS = 4


@pytest.fixture(params=ll_check.LAYOUTS)
def layout(request):
    return request.param


def dense_gradients(inputs, matrices, g):
    return oracle.dense_moe(inputs.x, inputs.topk_idx, inputs.topk_weights, matrices, g)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "checkpoint"])
def test_layer_and_its_gradients(backend, layout, wrap, check_vma, rng):
    inputs, matrices = cases.make_inputs(TINY, rng), programs.random_matrices(rng, TINY)
    g = rng.normal(size=inputs.x.shape).astype(np.float32)
    with ll_check.make_buffer(TINY, backend) as buffer:
        layer = wrap(ll_check.linear_moe(buffer, TINY, layout))
        run = programs.sharded(buffer, layer, check_vma=check_vma)

        def loss(x, topk_weights, matrices):
            out = run(x, inputs.topk_idx, topk_weights, matrices)
            return jnp.sum(g * out), out

        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
        (_, out), gradients = jax.device_get(step(inputs.x, inputs.topk_weights, matrices))
    truth = dense_gradients(inputs, matrices, g)
    np.testing.assert_allclose(out, truth.out, rtol=0, atol=1e-4)
    expected = (truth.d_x, truth.d_topk_weights, truth.d_matrices)
    for seen, known in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(seen, known, rtol=0, atol=2e-4 * np.abs(known).max())


def test_check_grads(layout, rng):
    """Also through edited weights and through after=, whose token carries no value."""
    inputs = cases.make_inputs(TINY, rng)
    with ll_check.make_buffer(TINY, "native") as buffer:

        def program(x, topk_idx, topk_weights):
            routed = ll_check.dispatch(buffer, TINY, layout, x, topk_idx, topk_weights, after=x)
            held = routed.weights > 0
            y = jnp.where(held[..., None], jnp.sin(routed.tokens), 0)
            edited = dataclasses.replace(routed, weights=jnp.where(held, routed.weights**2, 0))
            return jax_ep.low_latency_combine(buffer, y, edited, after=routed)

        run = jax.jit(programs.sharded(buffer, program))

        def function(x, topk_weights):
            return run(x, inputs.topk_idx, topk_weights)

        check_grads(function, (inputs.x, inputs.topk_weights), order=1, modes=["rev"], rtol=3e-2)


def test_scan_over_layers(backend, layout, rng):
    per_layer = [cases.make_inputs(TINY, rng) for _ in range(LAYERS)]
    matrices = np.stack([programs.random_matrices(rng, TINY) for _ in per_layer])
    topk_idx = np.stack([each.topk_idx for each in per_layer])
    topk_weights = np.stack([each.topk_weights for each in per_layer])
    x = per_layer[0].x
    with ll_check.make_buffer(TINY, backend) as buffer:
        layer = ll_check.linear_moe(buffer, TINY, layout)

        def stack(x, *stacks):
            return jax.lax.scan(lambda x, each: (layer(x, *each), None), x, stacks)[0]

        rows, stacked = PartitionSpec("expert"), PartitionSpec(None, "expert")
        run = programs.sharded(buffer, stack, in_specs=(rows, stacked, stacked, stacked))
        out, gradient = jax.jit(
            jax.value_and_grad(lambda x: jnp.sum(run(x, topk_idx, topk_weights, matrices)))
        )(x)
    for index, each in enumerate(per_layer):
        x = dense_gradients(dataclasses.replace(each, x=x), matrices[index], np.zeros_like(x)).out
    g = np.ones_like(x)
    for index in reversed(range(LAYERS)):
        g = dense_gradients(per_layer[index], matrices[index], g).d_x
    np.testing.assert_allclose(out, x.sum(), rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(gradient, g, rtol=0, atol=2e-4 * np.abs(g).max())


def test_vmap_makes_one_call_after_another(backend, layout, rng):
    batch = [cases.make_inputs(TINY, rng) for _ in range(3)]
    stacked = [
        np.stack([getattr(each, field.name) for each in batch])
        for field in dataclasses.fields(cases.Inputs)
    ]
    with ll_check.make_buffer(TINY, backend) as buffer:

        def program(*arrays):
            routed = ll_check.dispatch(buffer, TINY, layout, *arrays)
            return jax_ep.low_latency_combine(buffer, routed.tokens, routed)

        spec = PartitionSpec(None, "expert")
        run = programs.sharded(buffer, jax.vmap(program), in_specs=spec, out_specs=spec)
        outs = jax.jit(run)(*stacked)
    for out, each in zip(outs, batch, strict=True):
        expected = each.x * each.topk_weights.sum(1, keepdims=True)
        np.testing.assert_allclose(out, expected, rtol=0, atol=1e-4)


def compiled_text(function):
    shapes = (
        jax.ShapeDtypeStruct((TINY.R * TINY.T, TINY.H), jnp.float32),
        jax.ShapeDtypeStruct((TINY.R * TINY.T, TINY.K), jnp.int32),
        jax.ShapeDtypeStruct((TINY.R * TINY.T, TINY.K), jnp.float32),
    )
    return jax.jit(function).lower(*shapes).compile().as_text()


def test_fused_operations_are_pure_calls_without_copies_of_rows(layout):
    """Rows reach the experts and come back with no copy; padding is a bitcast."""
    with ll_check.make_buffer(TINY, "native") as buffer:

        def program(*arrays):
            routed = ll_check.dispatch(buffer, TINY, layout, *arrays)
            return jax_ep.low_latency_combine(buffer, jnp.tanh(routed.tokens), routed)

        text = compiled_text(programs.sharded(buffer, program))
    calls = re.findall(r'custom_call_target="(\w+)"', text)
    assert sorted(calls) == ["jax_ep_ll_combine", "jax_ep_ll_dispatch"]
    assert "custom_call_has_side_effect=true" not in text
    assert not re.findall(rf"= f32\[[\d,]*{TINY.H}\]\S* (?:copy|transpose)\(", text)


def test_after_orders_forwards_and_its_reverse_backwards(rng):
    """Two layers that share nothing: without after= nothing orders them, with it both passes do."""

    def gradients(ordered):
        def program(x, topk_idx, topk_weights):
            first = ll_check.dispatch(buffer, TINY, "padded", x, topk_idx, topk_weights)
            after = first if ordered else None
            second = ll_check.dispatch(
                buffer, TINY, "padded", 2 * x, topk_idx, topk_weights, after=after
            )
            return jnp.stack([jnp.sum(first.weights), jnp.sum(second.weights)])

        run = programs.sharded(buffer, program)

        def loss(x, topk_idx, topk_weights):
            return jnp.sum(run(x, topk_idx, topk_weights) ** 2)

        return compiled_text(jax.grad(loss, argnums=(0, 2)))

    with ll_check.make_buffer(TINY, "native") as buffer:
        for ordered in (False, True):
            text = gradients(ordered)
            reached = dependences(text)
            forward = [name for name in reached if "dispatch" in name[1]]
            backward = [name for name in reached if "combine" in name[1]]
            assert (len(forward), len(backward)) == (2, 2)
            # With an order one of each pair depends on the other.
            for pair in (forward, backward):
                linked = any(a in reached[b] for a in pair for b in pair if a != b)
                assert linked == ordered, text


def dependences(text):
    """For every call of ours in the HLO: the calls that it depends on, through any instruction."""
    operands, targets = {}, {}
    for line in text.splitlines():
        found = re.match(r"\s*(?:ROOT )?%([\w.\-]+) = (.*)", line)
        if not found:
            continue
        name, body = found.groups()
        operands[name] = set(re.findall(r"%([\w.\-]+)", body)) - {name}
        target = re.search(r'custom_call_target="jax_ep_(\w+)"', body)
        if target:
            targets[name] = target.group(1)

    def reachable(name):
        seen, stack = set(), [name]
        while stack:
            for operand in operands.get(stack.pop(), ()):
                if operand not in seen:
                    seen.add(operand)
                    stack.append(operand)
        return seen

    return {
        (name, target): {(n, targets[n]) for n in reachable(name) if n in targets}
        for name, target in targets.items()
    }
