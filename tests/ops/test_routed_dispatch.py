"""Dispatch along a routing is dispatch: same bits, same gradients, and no second exchange."""

import collections
import dataclasses
import re

import cases
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from notify_programs import routed_dispatch, true_sizes

import jax_ep

NAMES = (
    "one_rank_drops",
    "three_ranks",
    "eight_ranks_f16",
    "duplicates",
    "out_of_range",
    "no_tokens",
    "chunked",
    "chunk_of_one",
    "drops_aligned",
    "all_experts_of_32",
    "many_experts",
    "slots_chunked",
    "slots_drops",
)
CASE = cases.Case(name="routed", T=7, H=48, K=3, E=8, R=4, load=1.9, routing="some_nobody")
SLOTS = dataclasses.replace(CASE, name="routed_slots", expand=False)


def all_results(buffer, case, dispatch):
    """Jitted: what ``dispatch(x, topk_idx, topk_weights)`` gives, a layer's sum, and gradients."""

    def program(x, topk_idx, topk_weights, g, scale):
        def layer(x, topk_weights):
            routed = dispatch(x, topk_idx, topk_weights)
            out = jax_ep.combine(buffer, scale[0] * programs.expert_rows(routed), routed)
            return out, dataclasses.replace(routed, num_dropped=routed.num_dropped[None])

        out, pull, routed = jax.vjp(layer, x, topk_weights, has_aux=True)
        return routed, out, pull(g)

    return jax.jit(programs.sharded(buffer, program))


BACKENDS_AND_NAMES = [
    *((backend, name) for backend in ("native", "window") for name in NAMES),
    *(("reference", name) for name in ("three_ranks", "duplicates", "slots_drops")),
]


@pytest.mark.table
@pytest.mark.parametrize(("backend", "name"), BACKENDS_AND_NAMES)
def test_bits_are_those_of_dispatch(backend, name, rng):
    case = cases.BY_NAME[name]
    inputs = cases.make_inputs(case, rng)
    g = cases.random_rows(rng, inputs.x.shape, case.dtype)
    # XLA compiles no shard_map whose operands are all empty: one is not, also when T is 0.
    scale = np.full(case.R, 3, case.dtype)
    arguments = (inputs.x, inputs.topk_idx, inputs.topk_weights, g, scale)
    with programs.make_buffer(case, backend) as buffer:

        def plain(x, topk_idx, topk_weights):
            return programs.dispatch(buffer, case, x, topk_idx, topk_weights)

        def along(x, topk_idx, topk_weights):
            routing = jax_ep.route(buffer, topk_idx)
            return routed_dispatch(buffer, case, x, routing, topk_weights)

        expected = all_results(buffer, case, plain)(*arguments)
        seen = all_results(buffer, case, along)(*arguments)
        jax.tree.map(np.testing.assert_array_equal, seen, expected)
    if case.T:
        assert np.asarray(seen[0].tokens).any()


def test_a_routing_serves_many_dispatches(backend, rng):
    """Other rows, other capacities, other programs: one exchange."""
    inputs = cases.make_inputs(CASE, rng)
    sizes = true_sizes(inputs.topk_idx, CASE)
    with programs.make_buffer(CASE, backend) as buffer:
        notice = jax_ep.notify_dispatch(buffer, inputs.topk_idx)
        most = notice.capacity()
        for capacity in (most, most + 3, None):
            case = dataclasses.replace(CASE, load=None)

            def layer(routing, x, topk_idx, topk_weights, *, capacity=capacity):
                options = {"topk_weights": topk_weights, "capacity": capacity}
                twice = []
                for rows in (x, 2 * x):
                    routed = jax_ep.dispatch(buffer, rows, routing=routing, **options)
                    twice.append(jax_ep.combine(buffer, routed.tokens, routed))
                exchanged = jax_ep.dispatch(buffer, x, topk_idx, **options)
                expected = jax_ep.combine(buffer, exchanged.tokens, exchanged)
                return (*twice, expected, routed.valid_sizes[None], routed.num_dropped[None])

            x = cases.random_rows(rng, inputs.x.shape, case.dtype)
            program = jax.jit(programs.sharded(buffer, layer))
            arguments = (notice.routing, x, inputs.topk_idx, inputs.topk_weights)
            once, doubled, expected, valid, dropped = program(*arguments)
            np.testing.assert_array_equal(once, expected)
            np.testing.assert_array_equal(doubled, 2 * np.asarray(expected))
            np.testing.assert_array_equal(valid, sizes)
            assert not np.asarray(dropped).any()


def loss_along(buffer, case):
    """Scalar of a layer whose router is differentiated too, under scan and checkpoint."""

    def layer(x, matrix):
        scores = x @ matrix
        topk_weights, topk_idx = jax.lax.top_k(jax.nn.softmax(scores), case.K)
        routing = jax_ep.route(buffer, topk_idx)
        routed = routed_dispatch(buffer, case, x, routing, topk_weights)
        again = routed_dispatch(buffer, case, jnp.sin(x), routing, topk_weights)
        rows = programs.expert_rows(routed) * programs.expert_rows(again)
        return x + jax_ep.combine(buffer, rows, routed)

    def shard(x, matrix):
        step = jax.checkpoint(lambda x, _: (layer(x, matrix), None))
        return jax.lax.scan(step, x, length=2)[0]

    specs = (jax.sharding.PartitionSpec("expert"), jax.sharding.PartitionSpec())
    program = programs.sharded(buffer, shard, in_specs=specs)
    return lambda x, matrix: jnp.sum(jnp.square(program(x, matrix)))


@pytest.mark.parametrize("case", [CASE, SLOTS], ids=lambda case: case.name)
def test_gradients_of_a_router_agree_with_the_reference(case, rng):
    x = rng.normal(size=(case.R * case.T, case.H)).astype(np.float32)
    matrix = rng.normal(size=(case.H, case.E)).astype(np.float32)
    gradients = {}
    for backend in ("native", "reference"):
        with programs.make_buffer(case, backend) as buffer:
            compute = jax.jit(jax.grad(loss_along(buffer, case), argnums=(0, 1)))
            gradients[backend] = jax.block_until_ready(compute(x, matrix))
    for seen, expected in zip(gradients["native"], gradients["reference"], strict=True):
        scale = np.abs(expected).max()
        assert scale > 0.1
        np.testing.assert_allclose(seen, expected, rtol=0, atol=2e-5 * scale)


def custom_calls(text):
    return collections.Counter(re.findall(r'custom_call_target="(jax_ep_\w+)"', text))


@pytest.mark.parametrize("case", [CASE, SLOTS], ids=lambda case: case.name)
def test_no_second_exchange_in_the_program(case):
    """Forward and backward with a routing: no notify, no dispatch of its own, no collective."""
    with programs.make_buffer(case, "native") as buffer:

        def loss(x, routing, topk_weights):
            def layer(x, routing, topk_weights):
                routed = routed_dispatch(buffer, case, x, routing, topk_weights)
                rows = jnp.tanh(programs.expert_rows(routed))
                return jax_ep.combine(buffer, rows, routed)

            out = programs.sharded(buffer, layer)(x, routing, topk_weights)
            return jnp.sum(out**2), out

        routing = jax_ep.notify_dispatch(
            buffer, np.full((case.R * case.T, case.K), -1, np.int32)
        ).routing
        x = jnp.zeros((case.R * case.T, case.H))
        weights = jnp.zeros((case.R * case.T, case.K))
        forward = jax.jit(lambda *args: loss(*args)[1]).lower(x, routing, weights).compile()
        both = jax.jit(jax.grad(loss, argnums=(0, 2), has_aux=True))
        backward = both.lower(x, routing, weights).compile().as_text()
    collectives = r"\b(all-to-all|all-gather|collective-permute)"
    assert custom_calls(forward.as_text()) == {"jax_ep_dispatch_routed": 1, "jax_ep_combine": 1}
    expected = {"jax_ep_dispatch_routed": 1, "jax_ep_combine": 2, "jax_ep_combine_grad": 1}
    assert custom_calls(backward) == expected
    assert not re.findall(collectives, forward.as_text() + backward)


def test_route_is_merged_and_removed_like_a_function():
    with programs.make_buffer(CASE, "native") as buffer:

        def twice(topk_idx):
            first, second = jax_ep.route(buffer, topk_idx), jax_ep.route(buffer, topk_idx)
            jax_ep.route(buffer, topk_idx + 1)
            return first.counts + second.counts

        shape = jax.ShapeDtypeStruct((CASE.R * CASE.T, CASE.K), jnp.int32)
        program = programs.sharded(buffer, twice)
        assert not jax.make_jaxpr(program)(shape).effects
        text = jax.jit(program).lower(shape).compile().as_text()
    assert custom_calls(text) == {"jax_ep_notify": 1}


@pytest.mark.parametrize("field", ["topk_idx", "row_index", "counts"])
@pytest.mark.parametrize("value", [-1, 2**31 - 1, -(2**31), 5])
def test_a_spoiled_routing_addresses_no_memory(field, value, rng):
    """Its arrays are data like any other: whatever they hold, the program ends."""
    inputs = cases.make_inputs(CASE, rng)
    with programs.make_buffer(CASE, "native") as buffer:
        routing = jax_ep.notify_dispatch(buffer, inputs.topk_idx).routing
        spoiled = np.array(getattr(routing, field))
        spoiled[rng.random(spoiled.shape) < 0.5] = value
        routing = dataclasses.replace(routing, **{field: spoiled})

        def send(x, routing, topk_weights):
            routed = routed_dispatch(buffer, CASE, x, routing, topk_weights)
            return routed.handle.recv_rows, jax_ep.combine(buffer, routed.tokens, routed)

        program = jax.jit(programs.sharded(buffer, send))
        rows, _ = jax.block_until_ready(program(inputs.x, routing, inputs.topk_weights))
        assert np.asarray(rows).min() >= -1
        assert np.asarray(rows).max() < CASE.rows
        buffer.check()
