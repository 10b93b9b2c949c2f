"""Dispatch along a routing on GPUs: the bits of dispatch, any number of times."""

import dataclasses

import cases
import gpu_world
import jax
import numpy as np
import programs
import pytest
import test_routed_dispatch as on_cpu
from notify_programs import on_mesh, right_sized_step, routed_dispatch, true_sizes

import jax_ep

NAMES = (
    ("three_ranks", 2),
    ("eight_ranks_f16", 2),
    ("duplicates", 2),
    ("out_of_range", 1),
    ("chunked", 2),
    ("drops_aligned", 2),
    ("many_experts", 2),
    ("slots_chunked", 2),
    ("slots_drops", 2),
)
WIDE = cases.Case(name="wide", T=512, H=7168, K=8, E=64, R=2, dtype="bfloat16", load=1.5)
CASES = [(cases.BY_NAME[name], ranks) for name, ranks in NAMES] + [(WIDE, 2), (WIDE, 1)]
CASE = dataclasses.replace(on_cpu.CASE, R=2)


@pytest.mark.parametrize(
    ("case", "num_ranks"), CASES, ids=[f"{case.name}-{ranks}" for case, ranks in CASES]
)
def test_bits_are_those_of_dispatch(case, num_ranks, rng):
    """Rows, sizes, handle, the layer's sum and its gradients."""
    case = gpu_world.on_ranks(case, num_ranks)
    inputs = cases.make_inputs(case, rng)
    g = cases.random_rows(rng, inputs.x.shape, case.dtype)
    scale = np.full(case.R, 3, case.dtype)
    with gpu_world.make_buffer(case) as buffer:

        def plain(x, topk_idx, topk_weights):
            return programs.dispatch(buffer, case, x, topk_idx, topk_weights)

        def along(x, topk_idx, topk_weights):
            routing = jax_ep.route(buffer, topk_idx)
            return routed_dispatch(buffer, case, x, routing, topk_weights)

        arguments = (inputs.x, inputs.topk_idx, inputs.topk_weights, g, scale)
        placed = gpu_world.put(buffer, *arguments)
        expected = jax.block_until_ready(on_cpu.all_results(buffer, case, plain)(*placed))
        run = on_cpu.all_results(buffer, case, along)
        for _ in range(3):  # both parities
            seen = jax.block_until_ready(run(*placed))
            jax.tree.map(np.testing.assert_array_equal, seen, expected)
    assert np.asarray(seen[0].tokens).any()


def test_a_routing_serves_many_dispatches(num_gpus, rng):
    """Other rows, other capacities, other programs: one exchange."""
    case = gpu_world.on_ranks(dataclasses.replace(CASE, load=None), num_gpus)
    inputs = cases.make_inputs(case, rng)
    with gpu_world.make_buffer(case) as buffer:
        notice = jax_ep.notify_dispatch(buffer, inputs.topk_idx)
        step = right_sized_step(buffer)
        most = notice.capacity()
        np.testing.assert_array_equal(
            notice.recv_tokens_per_expert(), true_sizes(inputs.topk_idx, case)
        )
        valid = (inputs.topk_idx >= 0) * inputs.topk_weights
        for capacity in (most, most + 3, case.rows):
            x = cases.random_rows(rng, inputs.x.shape, case.dtype)
            out, dropped = step(x, notice.routing, inputs.topk_weights, capacity=capacity)
            np.testing.assert_allclose(out, valid.sum(axis=1, keepdims=True) * x, atol=1e-5)
            assert not np.asarray(dropped).any()
        _, dropped = step(x, notice.routing, inputs.topk_weights, capacity=max(1, most // 2))
        assert np.asarray(dropped).sum() > 0
        assert buffer.check() is None


@pytest.mark.parametrize("field", ["topk_idx", "row_index", "counts"])
def test_a_spoiled_routing_addresses_no_memory(field, rng):
    """Whatever its arrays hold, the program ends, and the buffer and all other memory are sound."""
    inputs = cases.make_inputs(CASE, rng)
    with gpu_world.make_buffer(CASE) as buffer:
        routing = jax_ep.notify_dispatch(buffer, inputs.topk_idx).routing

        def send(x, routing, topk_weights):
            routed = routed_dispatch(buffer, CASE, x, routing, topk_weights)
            out = jax_ep.combine(buffer, routed.tokens, routed)
            return routed.handle.recv_rows, routed.tokens, out

        program = jax.jit(programs.sharded(buffer, send))
        x, weights = on_mesh(buffer, inputs.x, inputs.topk_weights)
        expected = jax.block_until_ready(program(x, routing, weights))
        for value in (-1, 2**31 - 1, -(2**31), 5):
            spoiled = np.array(getattr(routing, field))
            spoiled[rng.random(spoiled.shape) < 0.5] = value
            (spoiled,) = on_mesh(buffer, spoiled)
            given = dataclasses.replace(routing, **{field: spoiled})
            rows = np.asarray(jax.block_until_ready(program(x, given, weights))[0])
            assert rows.min() >= -1
            assert rows.max() < CASE.rows
            again = jax.block_until_ready(program(x, routing, weights))
            jax.tree.map(np.testing.assert_array_equal, again, expected)
        assert buffer.check() is None
