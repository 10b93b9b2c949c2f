"""Silent, late and mistaken ranks in low-latency mode, in fused operations and in their halves."""

import cases
import jax
import ll_check
import numpy as np
import programs
import pytest
from fault_programs import AT_ONCE_S, GRACE_S, TIMEOUT_S, assert_same_bits, failure
from ll_check import TINY

import jax_ep


class Runs:
    """An open buffer and compiled programs on it with their arguments bound."""

    def __init__(self, rng):
        self.buffer = ll_check.make_buffer(TINY, "native", timeout_s=TIMEOUT_S)
        self.inputs = inputs = cases.make_inputs(TINY, rng)
        arrays = (inputs.x, inputs.topk_idx, inputs.topk_weights)
        buffer = self.buffer

        def fused(*arrays):
            routed = ll_check.dispatch(buffer, TINY, "padded", *arrays)
            return jax_ep.low_latency_combine(buffer, routed.tokens, routed)

        def halves(*arrays):
            routed = ll_check.split_dispatch(buffer, TINY, "padded", *arrays)
            return ll_check.split_combine(buffer, routed.tokens, routed)

        def dispatch_halves(*arrays):
            return ll_check.split_dispatch(buffer, TINY, "padded", *arrays).counts

        self.run = {}
        for function in (fused, halves, dispatch_halves):
            compiled = jax.jit(programs.sharded(buffer, function))
            self.run[function.__name__] = lambda compiled=compiled: compiled(*arrays)
        self.healthy = {name: jax.block_until_ready(run()) for name, run in self.run.items()}
        expected = inputs.x * inputs.topk_weights.sum(1, keepdims=True)
        np.testing.assert_allclose(self.healthy["halves"], expected, rtol=1e-5, atol=1e-5)

    def set_fault(self, kind, rank, microseconds=0):
        self.buffer._native.set_fault(self.buffer.id, kind, rank, microseconds=microseconds)

    def assert_right(self, name):
        assert_same_bits(self.run[name](), self.healthy[name])

    def assert_healthy(self):
        for name in self.run:
            self.assert_right(name)
        assert self.buffer.check() is None


@pytest.fixture(scope="module")
def runs():
    seed = cases.fresh_seed()
    print(f"{cases.SEED_VARIABLE}={seed}")
    runs = Runs(np.random.default_rng(seed))
    yield runs
    runs.buffer.close()


@pytest.fixture(autouse=True)
def healthy_again(runs):
    yield
    runs.buffer.reset()


@pytest.mark.parametrize("which", ["fused", "dispatch_halves"])
def test_a_silent_rank_is_named_and_reset_mends(runs, which, rng):
    silent = int(rng.integers(TINY.R))
    runs.set_fault("skip_send", silent)
    text, seconds = failure(runs.run[which])
    assert TIMEOUT_S * 0.9 < seconds < TIMEOUT_S + GRACE_S
    for part in ("EpTimeoutError", "dispatch", f"rank {silent}", "reset()"):
        assert part in text
    with pytest.raises(jax_ep.EpTimeoutError) as raised:
        runs.buffer.check()
    assert (raised.value.peer, raised.value.op) == (silent, "dispatch")
    for run in runs.run.values():
        text, seconds = failure(run)
        assert "EpTimeoutError" in text
        assert seconds < AT_ONCE_S
    runs.buffer.reset()
    runs.assert_healthy()


@pytest.mark.parametrize("which", ["fused", "halves"])
def test_another_operation_is_a_mismatch(runs, which, rng):
    runs.set_fault("wrong_tag", int(rng.integers(TINY.R)))
    text, _ = failure(runs.run[which])
    assert "EpMismatchError" in text
    with pytest.raises(jax_ep.EpMismatchError):
        runs.buffer.check()
    runs.buffer.reset()
    runs.assert_healthy()


@pytest.mark.parametrize("which", ["fused", "halves"])
def test_late_ranks_and_slow_messages_change_nothing(runs, which, rng):
    runs.set_fault("late", int(rng.integers(TINY.R)), 100_000)
    runs.assert_right(which)
    for rank in range(TINY.R):
        runs.set_fault("jitter", rank, 500)
    for _ in range(20):
        runs.assert_right(which)
    for rank in range(TINY.R):
        runs.set_fault("none", rank)
    runs.assert_healthy()


def test_a_start_of_a_failed_program_is_forgotten_by_reset(runs, rng):
    """Its done never came: the channel is short of one epoch until reset()."""
    runs.set_fault("skip_send", int(rng.integers(TINY.R)))
    failure(runs.run["halves"])
    runs.buffer.reset()
    for _ in range(3):
        runs.assert_healthy()


def test_a_rank_that_skips_the_done_times_out(runs):
    """As with any operation: control flow must not differ between ranks."""
    buffer, inputs = runs.buffer, runs.inputs

    def program(*arrays):
        pending = jax_ep.low_latency_dispatch_start(buffer, *arrays)
        rank = jax.lax.axis_index("expert")

        def done():
            return jax_ep.low_latency_dispatch_done(buffer, pending).counts

        return jax.lax.cond(rank == 1, lambda: 0 * pending.topk_idx[0, :2], done)

    run = jax.jit(programs.sharded(buffer, program, check_vma=False))
    text, seconds = failure(lambda: run(inputs.x, inputs.topk_idx, inputs.topk_weights))
    assert "EpTimeoutError" in text
    assert "rank 1" in text
    assert TIMEOUT_S * 0.9 < seconds < TIMEOUT_S + GRACE_S
    runs.buffer.reset()
    runs.assert_healthy()
