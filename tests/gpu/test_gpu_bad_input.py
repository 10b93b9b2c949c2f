"""Bad input on GPUs: what tracing refuses, and faults of the data that kernels meet."""

import dataclasses

import cases
import gpu_world
import jax
import numpy as np
import oracle
import programs
import pytest
import test_bad_input as on_cpu

import jax_ep


@pytest.fixture
def small(num_gpus, monkeypatch):
    """The case of the CPU's tests on this number of GPUs, and a buffer for it."""
    case = dataclasses.replace(on_cpu.CASE, R=num_gpus)
    monkeypatch.setattr(on_cpu, "CASE", case)
    with gpu_world.make_buffer(case) as buffer:
        yield case, buffer


def dispatched(buffer, case, inputs):
    """Runs one dispatch; returns the handle's topk_idx."""

    def program(x, topk_idx, topk_weights):
        return programs.dispatch(buffer, case, x, topk_idx, topk_weights).handle.topk_idx

    run = jax.jit(programs.sharded(buffer, program))
    return np.asarray(run(*gpu_world.put(buffer, inputs.x, inputs.topk_idx, inputs.topk_weights)))


def still_right(buffer, case, rng):
    inputs = cases.make_inputs(case, rng)
    np.testing.assert_array_equal(dispatched(buffer, case, inputs), inputs.topk_idx)
    assert buffer.check() is None


def test_bad_arguments_are_refused_before_anything_is_sent(small, rng):
    case, buffer = small
    for name, shape, dtype, named, remedy in on_cpu.BAD_ARRAYS:
        arrays = on_cpu.arguments(**{name: on_cpu.rows(*shape, dtype=dtype)})
        with pytest.raises(jax_ep.EpUsageError, match=f"(?s){named}.*{remedy}"):
            on_cpu.dispatch_with(buffer, arrays)
    for options, named, remedy in on_cpu.BAD_OPTIONS:
        with pytest.raises(jax_ep.EpUsageError, match=f"(?s){named}.*{remedy}"):
            on_cpu.dispatch_with(buffer, on_cpu.arguments(), options)
    assert buffer.stats()["dispatch_epochs"] == 0
    still_right(buffer, case, rng)


def test_alignment_that_gpus_do_not_take(small, rng):
    case, buffer = small
    with pytest.raises(Exception, match=r"(?s)EpUsageError: dispatch: expert_alignment=8192.*4096"):
        jax.block_until_ready(
            on_cpu.dispatch_with(buffer, on_cpu.arguments(), {"expert_alignment": 8192})
        )
    still_right(buffer, case, rng)


def test_data_faults_are_counted_and_located(small, rng):
    case, buffer = small
    inputs = cases.make_inputs(case, rng)
    rank, token = int(rng.integers(case.R)), int(rng.integers(case.T))
    row = rank * case.T + token
    for values, kind in ([[3, 99], "out_of_range"], [[5, 5], "duplicate"]):
        topk_idx = inputs.topk_idx.copy()
        topk_idx[row] = values
        dispatched(buffer, case, dataclasses.replace(inputs, topk_idx=topk_idx))
        with pytest.raises(jax_ep.EpDataError) as caught:
            buffer.check()
        error = caught.value
        seen = (error.count, error.rank, error.token, error.k, error.value, error.kind)
        assert seen == (1, rank, token, 1, values[1], kind)
        assert buffer.check() is None
    still_right(buffer, case, rng)


@pytest.mark.parametrize("name", ["out_of_range", "duplicates"])
def test_data_faults_of_a_whole_run_are_all_counted(num_gpus, rng, name):
    case = dataclasses.replace(gpu_world.on_ranks(cases.BY_NAME[name], num_gpus), T=301)
    inputs = cases.make_inputs(case, rng)
    stacked = inputs.topk_idx.reshape(case.R, case.T, case.K)
    clean, out_of_range, duplicates = oracle.clean(stacked, case.E)
    with gpu_world.make_buffer(case) as buffer:
        seen = dispatched(buffer, case, inputs)
        np.testing.assert_array_equal(seen.reshape(clean.shape), clean)
        with pytest.raises(jax_ep.EpDataError) as caught:
            buffer.check()
        assert buffer.check() is None
    error = caught.value
    assert error.count == out_of_range + duplicates
    # The first fault of the lowest rank that met one.
    rank, token, k = np.argwhere((stacked != clean) & (stacked != -1))[0]
    assert (error.rank, error.token, error.k) == (rank, token, k)
    assert error.value == stacked[rank, token, k]
    in_range = 0 <= error.value < case.E
    assert error.kind == ("duplicate" if in_range else "out_of_range")
