"""Ranks that run something else, come late, or never come."""

import time

import cases
import jax
import programs
import pytest
from fault_programs import (
    AT_ONCE_S,
    GRACE_S,
    OPERATIONS,
    TIMEOUT_S,
    assert_same_bits,
    compiled,
    failure,
    fault_case,
    open_setup,
    sharded_routed,
    sleeper,
)

import jax_ep


@pytest.fixture(scope="module", params=["native", "window"])
def setup(request):
    with open_setup(4, request.param) as setup:
        yield setup


@pytest.fixture(autouse=True)
def healthy_again(setup):
    """One failed test must not make the others fail."""
    yield
    setup.buffer.reset()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_another_operation_is_a_mismatch_and_not_a_mixture(setup, operation, rng):
    odd = int(rng.integers(4))
    epoch = setup.next_epoch(operation)
    setup.set_fault("wrong_tag", odd)
    text, seconds = failure(setup.run[operation])
    assert "EpMismatchError" in text
    assert seconds < AT_ONCE_S, "a mismatch is seen, not waited for"
    mismatches = [record for record in setup.records(1) if record["kind"] == "mismatch"]
    assert mismatches
    for record in mismatches:
        assert odd in (record["rank"], record["peer"]), record
        assert (record["op"], record["epoch"]) == (operation, epoch), record
        assert record["expected"] != record["seen"]
    with pytest.raises(jax_ep.EpMismatchError, match=operation) as raised:
        setup.buffer.check()
    assert odd in (raised.value.rank, raised.value.peer)
    assert raised.value.epoch == epoch
    setup.buffer.reset()
    setup.assert_healthy()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_late_within_the_deadline_is_well(setup, operation, rng):
    setup.set_fault("late", int(rng.integers(4)), 0.6)
    began = time.monotonic()
    assert_same_bits(setup.run[operation](), setup.healthy[operation])
    assert time.monotonic() - began > 0.55, "the fault was not injected"
    setup.assert_healthy()


def test_late_beyond_the_deadline_is_a_timeout_for_the_late_rank_too(setup):
    setup.set_fault("late", 2, TIMEOUT_S + 1)
    text, seconds = failure(setup.run["dispatch"])
    assert "EpTimeoutError" in text
    assert seconds < TIMEOUT_S + 1 + GRACE_S
    assert {record["peer"] for record in setup.records(3)} == {2}
    with pytest.raises(jax_ep.EpTimeoutError):
        setup.buffer.check()
    setup.buffer.reset()
    setup.assert_healthy()


def wait_for_records(buffer: jax_ep.Buffer, count: int, limit: float) -> float:
    """Waits for check() to raise EpTimeoutError with ``count`` records; returns the seconds."""
    began = time.monotonic()
    while time.monotonic() - began < limit:
        try:
            buffer.check()
        except jax_ep.EpTimeoutError as error:
            if len(error.records) == count:
                return time.monotonic() - began
        time.sleep(0.02)
    raise AssertionError(f"check() did not tell of {count} ranks within {limit} s")


def test_a_rank_that_does_not_present_is_named(rng):
    """A device stays in host code. The others say so, and the buffer can be reset meanwhile."""
    case = fault_case(4)
    absent, nap = int(rng.integers(4)), TIMEOUT_S + 1.5
    through, armed = sleeper(absent, nap)
    inputs = cases.make_inputs(case, rng)
    arguments = (inputs.x, inputs.topk_idx, inputs.topk_weights)
    with programs.make_buffer(case, "native", timeout_s=TIMEOUT_S) as buffer:

        def program(x, topk_idx, topk_weights):
            return sharded_routed(buffer, case, through("expert", x), topk_idx, topk_weights)

        run = compiled(buffer, program, check_vma=False)
        healthy = jax.block_until_ready(run(*arguments))
        armed["on"] = True
        began = time.monotonic()
        doomed = run(*arguments)
        seconds = wait_for_records(buffer, 3, TIMEOUT_S + GRACE_S)
        assert seconds > TIMEOUT_S * 0.9
        with pytest.raises(jax_ep.EpTimeoutError, match="its start") as raised:
            buffer.check()
        records = raised.value.records
        assert {record["rank"] for record in records} == set(range(4)) - {absent}
        assert {(record["op"], record["peer"]) for record in records} == {("dispatch", absent)}
        armed["on"] = False
        buffer.reset()
        assert buffer.check() is None

        text, _ = failure(lambda: doomed)  # the sleeper has come to a run that is over
        assert time.monotonic() - began > nap * 0.9
        assert "EpTimeoutError" in text or "had already failed" in text
        assert buffer.check() is None, "a latecomer of the old run disturbed the reset buffer"
        assert_same_bits(run(*arguments), healthy)
