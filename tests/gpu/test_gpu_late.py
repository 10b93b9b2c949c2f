"""A rank that comes late: within the deadline nothing happens, beyond it the other names it."""

import dataclasses
import time

import case_check
import cases
import gpu_world
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from fault_programs import sleeper

import jax_ep

CASE = cases.Case(name="late", T=45, H=64, K=3, E=12, R=2, chunk=16)
TIMEOUT_S = 1.0
LATE_RANK = 1


def make_program(buffer, through, operation):
    """All operations in a row, with a place for ``LATE_RANK`` to sleep before one of them."""

    def place(name, value):
        return through("expert", value) if name == operation else value

    def program(x, topk_idx, topk_weights, g):
        routed = programs.dispatch(buffer, CASE, place("dispatch", x), topk_idx, topk_weights)
        y = place("combine", gpu_world.leaky(routed.tokens))

        def bring_back(y, weights):
            return jax_ep.combine(buffer, y, dataclasses.replace(routed, weights=weights))

        out, pull = jax.vjp(bring_back, y, routed.weights)
        # Through the data, each operation comes after the one before.
        d_y, d_weights = pull(place("combine_grad", g + out))
        return {"out": out, "d_y": d_y, "d_weights": d_weights}

    return jax.jit(programs.sharded(buffer, program, check_vma=False))


def troubled(run, placed, expected) -> float:
    """Runs to the end what must fail, and returns the seconds it took.

    A handler that is called raises. Launches replayed from a graph call no handler: then the
    outputs are spoiled, and ``Buffer.check`` tells.
    """
    began = time.monotonic()
    text, results = None, {}
    try:
        results = jax.block_until_ready(run(*placed))
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
    seconds = time.monotonic() - began
    if text is None:
        assert any(np.isnan(np.asarray(array)).any() for array in results.values())
    else:
        assert expected in text
    return seconds


@pytest.fixture
def arguments(rng):
    inputs = cases.make_inputs(CASE, rng)
    g = cases.random_rows(rng, inputs.x.shape, CASE.dtype)
    return inputs.x, inputs.topk_idx, inputs.topk_weights, g


def test_late_within_the_deadline(arguments):
    through, armed = sleeper(LATE_RANK, 0.4)
    with gpu_world.make_buffer(CASE, timeout_s=5.0) as buffer:
        run = make_program(buffer, through, "dispatch")
        placed = gpu_world.put(buffer, *arguments)
        first = jax.tree.map(np.asarray, run(*placed))
        armed["on"] = True
        gpu_world.assert_same_bits(run(*placed), first)
        assert buffer.check() is None


@pytest.mark.parametrize("operation", ["dispatch", "combine", "combine_grad"])
def test_late_beyond_the_deadline(arguments, rng, operation):
    through, armed = sleeper(LATE_RANK, 2.5 * TIMEOUT_S)
    with gpu_world.make_buffer(CASE, timeout_s=TIMEOUT_S) as buffer:
        run = make_program(buffer, through, operation)
        placed = gpu_world.put(buffer, *arguments)
        first = jax.tree.map(np.asarray, run(*placed))

        armed["on"] = True
        troubled(run, placed, f"EpTimeoutError: {operation}")
        with pytest.raises(jax_ep.EpTimeoutError, match=f"for rank {LATE_RANK}") as caught:
            buffer.check()
        error = caught.value
        assert (error.op, error.rank, error.peer) == (operation, 1 - LATE_RANK, LATE_RANK)
        assert error.epoch > 0

        armed["on"] = False
        assert troubled(run, placed, "EpTimeoutError") < TIMEOUT_S / 2
        with pytest.raises(jax_ep.EpTimeoutError):
            buffer.check()

        # The CUDA contexts live.
        for device in buffer.mesh.devices:
            assert float(jnp.sum(jax.device_put(jnp.arange(5.0), device))) == 10
        buffer.reset()
        assert buffer.check() is None
        gpu_world.assert_same_bits(run(*placed), first)

        problem = case_check.make_problem(CASE, rng)
        everything = case_check.everything(buffer, CASE)
        results = everything(*gpu_world.put(buffer, *problem.arguments()))
        case_check.check_against_oracle(CASE, problem, results)
        assert buffer.check() is None


def test_other_buffers_go_on(arguments):
    """One group's trouble is its own."""
    through, armed = sleeper(LATE_RANK, 2.5 * TIMEOUT_S)
    plain, _ = sleeper(LATE_RANK, 0)
    with (
        gpu_world.make_buffer(CASE, timeout_s=TIMEOUT_S) as troubled_buffer,
        gpu_world.make_buffer(CASE) as other,
    ):
        run, healthy = (
            make_program(troubled_buffer, through, "dispatch"),
            make_program(other, plain, "none"),
        )
        placed = gpu_world.put(other, *arguments)
        first = jax.tree.map(np.asarray, healthy(*placed))
        gpu_world.assert_same_bits(run(*placed), first)
        armed["on"] = True
        troubled(run, placed, "EpTimeoutError")
        with pytest.raises(jax_ep.EpTimeoutError):
            troubled_buffer.check()
        gpu_world.assert_same_bits(healthy(*placed), first)
        assert other.check() is None
