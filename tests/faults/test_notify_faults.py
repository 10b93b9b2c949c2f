"""Counts that do not come: an error in time that says which counter of which rank."""

import time

import cases
import jax
import numpy as np
import programs
import pytest
from fault_programs import AT_ONCE_S, GRACE_S, TIMEOUT_S, fault_case, hooks
from notify_programs import true_sizes

import jax_ep

CASE = fault_case(4)
SHORT_S = 0.3


@pytest.fixture
def buffer():
    made = programs.make_buffer(CASE, "native", timeout_s=TIMEOUT_S)
    yield made
    made.reset()
    made.close()


def set_fault(buffer, kind, rank, seconds=0.0):
    hooks(buffer).set_fault(buffer.id, kind, rank, microseconds=round(seconds * 1e6))


def read_fails(notice, error):
    began = time.monotonic()
    with pytest.raises(error) as raised:
        notice.capacity()
    return raised.value, time.monotonic() - began


def test_a_rank_that_never_sends(buffer, rng):
    topk_idx = cases.make_inputs(CASE, rng).topk_idx
    silent = int(rng.integers(CASE.R))
    jax_ep.notify_dispatch(buffer, topk_idx).capacity()
    set_fault(buffer, "skip_send", silent)
    notice = jax_ep.notify_dispatch(buffer, topk_idx, timeout_s=4 * TIMEOUT_S)
    error, seconds = read_fails(notice, jax_ep.EpTimeoutError)
    assert TIMEOUT_S * 0.9 < seconds < TIMEOUT_S + GRACE_S
    for part in ("num_recv_tokens of rank 0", "ticket 2", "notify, epoch 2", f"for rank {silent}"):
        assert part in str(error)
    assert (error.op, error.peer) == ("notify", silent)

    error, seconds = read_fails(jax_ep.notify_dispatch(buffer, topk_idx), jax_ep.EpTimeoutError)
    assert seconds < AT_ONCE_S, "a window known to be broken was waited for"
    buffer.reset()
    healthy = jax_ep.notify_dispatch(buffer, topk_idx)
    np.testing.assert_array_equal(healthy.recv_tokens_per_expert(), true_sizes(topk_idx, CASE))


def test_a_rank_that_runs_something_else(buffer, rng):
    topk_idx = cases.make_inputs(CASE, rng).topk_idx
    strange = int(rng.integers(CASE.R))
    set_fault(buffer, "wrong_tag", strange)
    notice = jax_ep.notify_dispatch(buffer, topk_idx)
    error, seconds = read_fails(notice, jax_ep.EpMismatchError)
    assert seconds < AT_ONCE_S
    assert "notify" in str(error)
    assert strange in (error.rank, error.peer)


def test_the_notice_may_be_less_patient_than_the_operation(buffer, rng):
    """The counter that is missing has a name; once it has come, the same notice can be read."""
    topk_idx = cases.make_inputs(CASE, rng).topk_idx
    jax_ep.notify_dispatch(buffer, topk_idx).capacity()
    set_fault(buffer, "late", int(rng.integers(CASE.R)), 3 * SHORT_S)
    notice = jax_ep.notify_dispatch(buffer, topk_idx, timeout_s=SHORT_S)
    error, seconds = read_fails(notice, jax_ep.EpTimeoutError)
    assert SHORT_S * 0.9 < seconds < SHORT_S + AT_ONCE_S
    for part in ("num_recv_tokens of rank 0", f"{SHORT_S} s", "ticket 2", "Raise timeout_s"):
        assert part in str(error)
    assert (error.op, error.expected, error.seen) == ("notify", 2, 0)
    jax.block_until_ready(notice.routing)
    np.testing.assert_array_equal(notice.recv_tokens_per_expert(), true_sizes(topk_idx, CASE))
    buffer.check()


def test_an_operation_that_was_refused(buffer, rng):
    """Its counters will not come: the reader is told why at once, not after its deadline."""
    topk_idx = cases.make_inputs(CASE, rng).topk_idx
    held = buffer._fingerprint
    buffer._fingerprint = held + 1  # as in a program from a compilation cache
    try:
        notice = jax_ep.notify_dispatch(buffer, topk_idx)
    finally:
        buffer._fingerprint = held
    error, seconds = read_fails(notice, jax_ep.EpError)
    assert seconds < AT_ONCE_S
    assert "is not the one this program was compiled for" in str(error)


def test_a_rank_that_does_not_send_along_a_routing(buffer, rng):
    """Dispatch along a routing waits for tags and rows as ever, and says which rank is missing."""
    inputs = cases.make_inputs(CASE, rng)
    routing = jax_ep.notify_dispatch(buffer, inputs.topk_idx).routing
    silent = int(rng.integers(CASE.R))

    def send(x, routing, topk_weights):
        return jax_ep.dispatch(buffer, x, topk_weights=topk_weights, routing=routing).tokens

    program = jax.jit(programs.sharded(buffer, send))
    expected = np.asarray(program(inputs.x, routing, inputs.topk_weights))
    set_fault(buffer, "skip_send", silent)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"EpTimeoutError.*rank {silent}"):
        jax.block_until_ready(program(inputs.x, routing, inputs.topk_weights))
    buffer.reset()
    again = np.asarray(program(inputs.x, routing, inputs.topk_weights))
    np.testing.assert_array_equal(again, expected)
