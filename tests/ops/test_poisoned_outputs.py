"""Outputs written into memory full of NaN: every element that is specified must be written."""

import case_check
import cases
import jax
import numpy as np
import oracle
import programs
import pytest

import jax_ep

NAMES = ("aligned", "drops", "spare_capacity", "nobody", "empty_ranks", "loose_tail")
SLOTS = ("slots_drops", "slots_nobody", "slots_three_ranks", "slots_tail", "slots_chunked")


def run_poisoned(buffer, program, poison, inputs):
    """Gives the memory of ``poison`` to the results of ``program(*poison, *inputs)``."""
    sharding = jax.sharding.NamedSharding(buffer.mesh, jax.sharding.PartitionSpec("expert"))
    donated = [jax.device_put(array, sharding) for array in poison]
    run = jax.jit(
        programs.sharded(buffer, program),
        donate_argnums=tuple(range(len(poison))),
        keep_unused=True,
    )
    arguments = (*donated, inputs.x, inputs.topk_idx, inputs.topk_weights)
    assert run.lower(*arguments).compile().as_text().count("may-alias") >= 2
    return [np.asarray(array) for array in run(*arguments)]


@pytest.mark.parametrize("name", NAMES)
def test_every_specified_element_is_written(rng, name):
    case = cases.BY_NAME[name]
    inputs = cases.make_inputs(case, rng)
    truth = case_check.truth_of(case, inputs)

    def program(_tokens, _weights, _out, x, topk_idx, topk_weights):
        routed = programs.dispatch(buffer, case, x, topk_idx, topk_weights)
        out = jax_ep.combine(buffer, routed.tokens, routed)
        return routed.tokens, routed.weights, out

    poison = [
        np.full(shape, np.nan, np.float32)
        for shape in (
            (case.R * case.rows, case.H),
            (case.R * case.rows,),
            (case.R * case.T, case.H),
        )
    ]
    with programs.make_buffer(case, "native") as buffer:
        tokens, weights, out = run_poisoned(buffer, program, poison, inputs)

    written = case_check.written_rows(case, truth)
    tokens = tokens.reshape(truth.tokens.shape)
    np.testing.assert_array_equal(tokens[written], truth.tokens[written])
    np.testing.assert_array_equal(weights.reshape(truth.weights.shape), truth.weights)
    expected = oracle.combine(truth, truth.tokens, truth.weights).reshape(out.shape)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", SLOTS)
def test_every_slot_and_the_whole_map_are_written(rng, name):
    case = cases.BY_NAME[name]
    inputs = cases.make_inputs(case, rng)
    truth = case_check.truth_of(case, inputs)

    def program(_tokens, _row_map, x, topk_idx, topk_weights):
        routed = programs.dispatch(buffer, case, x, topk_idx, topk_weights)
        return routed.tokens, routed.row_map

    poison = [
        np.full((case.R * case.R * case.T, case.H), np.nan, np.float32),
        np.full((case.R * case.rows,), -77, np.int32),
    ]
    with programs.make_buffer(case, "native") as buffer:
        tokens, row_map = run_poisoned(buffer, program, poison, inputs)
    for seen, expected in zip(
        (tokens, row_map), oracle.slots(truth, case_check.by_rank(inputs.x, case)), strict=True
    ):
        np.testing.assert_array_equal(seen.reshape(expected.shape), expected)
