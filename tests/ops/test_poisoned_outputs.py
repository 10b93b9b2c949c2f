"""Outputs written into memory full of NaN: every element that is specified must be written."""

import cases
import jax
import numpy as np
import oracle
import programs
import pytest

import jax_ep

NAMES = ("aligned", "drops", "spare_capacity", "nobody", "empty_ranks", "loose_tail")


@pytest.mark.parametrize("name", NAMES)
def test_every_specified_element_is_written(rng, name):
    case = cases.BY_NAME[name]
    inputs = cases.make_inputs(case, rng)
    truth = oracle.dispatch(
        *(
            array.reshape(case.R, case.T, -1)
            for array in (inputs.x, inputs.topk_idx, inputs.topk_weights)
        ),
        num_experts=case.E,
        capacity=case.rows,
        alignment=case.alignment,
    )

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
        sharding = jax.sharding.NamedSharding(buffer.mesh, jax.sharding.PartitionSpec("expert"))
        run = jax.jit(programs.sharded(buffer, program), donate_argnums=(0, 1, 2), keep_unused=True)
        donated = [jax.device_put(array, sharding) for array in poison]
        arguments = (*donated, inputs.x, inputs.topk_idx, inputs.topk_weights)
        # The donated arrays' memory becomes the results'.
        assert run.lower(*arguments).compile().as_text().count("may-alias") >= 2
        tokens, weights, out = (np.asarray(array) for array in run(*arguments))

    written = np.arange(case.rows)[None] < truth.group_sizes.sum(1, keepdims=True)
    written |= case.zero_tail
    tokens = tokens.reshape(truth.tokens.shape)
    np.testing.assert_array_equal(tokens[written], truth.tokens[written])
    np.testing.assert_array_equal(weights.reshape(truth.weights.shape), truth.weights)
    expected = oracle.combine(truth, truth.tokens, truth.weights).reshape(out.shape)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)
