"""Halves on GPUs: interleaved, out of turn, from before a reset; and ranks that come late.

The kernels keep the order of starts and dones by themselves: what is out of turn spoils its
results, and ``Buffer.check`` tells.
"""

import dataclasses
import re

import cases
import gpu_world
import jax
import ll_check
import numpy as np
import programs
import pytest
import test_gpu_late
import test_low_latency_halves as on_cpu
from fault_programs import sleeper
from ll_check import TINY

import jax_ep

TIMEOUT_S = 1.0
LATE_RANK = 1


@pytest.fixture
def case(num_gpus, monkeypatch):
    """The case of the CPU's tests on this number of GPUs."""
    case = dataclasses.replace(TINY, R=num_gpus)
    monkeypatch.setattr(on_cpu, "TINY", case)
    return case


def make_buffer(case, **changes) -> jax_ep.Buffer:
    return gpu_world.make_buffer(case, mode="low_latency", **changes)


def arrays_of(buffer, inputs):
    return gpu_world.put(buffer, *on_cpu.arguments_of(inputs))


def assert_sum(out, inputs, times=1):
    expected = times * on_cpu.expected_sum(inputs)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_two_micro_batches_interleaved(case, rng):
    """Fresh inputs in every call; after some, XLA replays what it has captured."""
    with make_buffer(case) as buffer:

        def program(*arrays):
            return on_cpu.two_micro_batches(buffer, arrays[:3], arrays[3:])

        run = jax.jit(programs.sharded(buffer, program))
        for _ in range(20):
            first, second = cases.make_inputs(case, rng), cases.make_inputs(case, rng)
            out_a, out_b = run(*arrays_of(buffer, first), *arrays_of(buffer, second))
            assert_sum(out_a, first)
            assert_sum(out_b, second, 2)
        assert buffer.check() is None


def test_a_rank_may_be_two_starts_ahead(rng):
    """One rank sleeps before its dones: the other's next starts must not overwrite what waits."""
    case = dataclasses.replace(TINY, R=2)
    gpu_world.require_cuda(2)
    through, armed = sleeper(LATE_RANK, 0.05)
    inputs = [cases.make_inputs(case, rng) for _ in range(6)]
    with make_buffer(case) as buffer:

        def program(*arrays):
            outs, last = [], None
            for pair in range(3):
                batches = [arrays[6 * pair + 3 * i : 6 * pair + 3 * i + 3] for i in range(2)]
                a = jax_ep.low_latency_dispatch_start(buffer, *batches[0], after=last)
                b = jax_ep.low_latency_dispatch_start(buffer, *batches[1], after=a)
                pause = through("expert", jax_ep.order_after(batches[0][0], b))
                routed_a = jax_ep.low_latency_dispatch_done(buffer, a, after=pause)
                routed_b = jax_ep.low_latency_dispatch_done(buffer, b, after=routed_a)
                last = routed_b
                outs += [routed_a, routed_b]
            return [_sum_of(buffer, routed) for routed in outs]

        run = jax.jit(programs.sharded(buffer, program, check_vma=False))
        armed["on"] = True
        arguments = [a for each in inputs for a in arrays_of(buffer, each)]
        for _ in range(3):
            for out, each in zip(run(*arguments), inputs, strict=True):
                dense = each.x * each.topk_weights.sum(1, keepdims=True)
                np.testing.assert_allclose(out, dense, rtol=1e-5, atol=1e-5)
        assert buffer.check() is None


def _sum_of(buffer, routed):
    return jax_ep.low_latency_combine(buffer, routed.tokens, routed)


def test_a_pending_may_leave_one_program_for_another(case, rng):
    inputs = cases.make_inputs(case, rng)
    with make_buffer(case) as buffer:
        start, done = on_cpu.split_programs(buffer)
        for _ in range(3):
            assert_sum(done(start(*arrays_of(buffer, inputs))), inputs)
        assert buffer.check() is None


def run_anyway(run, *arguments):
    """What a call gives; None where its handler has heard of the trouble and raised."""
    try:
        return jax.block_until_ready(run(*arguments))
    except jax.errors.JaxRuntimeError as error:
        if "EpUsageError" not in str(error):
            raise
        return None


@pytest.fixture
def halves(case, rng):
    """A buffer, its compiled start, done and fused dispatch, and arguments for them."""
    inputs = cases.make_inputs(case, rng)
    with make_buffer(case) as buffer:
        start, done = on_cpu.split_programs(buffer)

        def fused(*arrays):
            return jax_ep.low_latency_dispatch(buffer, *arrays).counts

        arguments = arrays_of(buffer, inputs)
        run_fused = jax.jit(programs.sharded(buffer, fused))
        for run in (lambda *a: done(start(*a)), run_fused):  # compile, then count from 1
            jax.block_until_ready(run(*arguments))
        buffer.reset()
        yield buffer, start, done, run_fused, arguments
        buffer.reset()
        assert buffer.check() is None
        assert_sum(done(start(*arguments)), inputs)


def check_usage(buffer, pattern):
    for _ in range(2):  # it stays until reset()
        with pytest.raises(jax_ep.EpUsageError, match=f"(?s){pattern}.*reset"):
            buffer.check()


def test_a_third_start_is_recorded_at_once(halves):
    buffer, start, _, _, arguments = halves
    for _ in range(2):
        jax.block_until_ready(start(*arguments))
    assert buffer.check() is None
    pending = run_anyway(start, *arguments)
    if pending is not None:
        assert (np.asarray(pending.topk_idx) == -1).all()
    check_usage(buffer, "dispatch, epoch 3.*start of epoch 1 has had no done")


def test_a_done_twice_is_recorded(halves):
    buffer, start, done, _, arguments = halves
    pending = jax.block_until_ready(start(*arguments))
    jax.block_until_ready(done(pending))
    assert buffer.check() is None
    out = run_anyway(done, pending)
    assert out is None or np.isnan(np.asarray(out)).all()
    check_usage(buffer, "dispatch done: its pending names epoch 1")


def test_dones_keep_the_order_of_their_starts(halves):
    buffer, start, done, _, arguments = halves
    pending = [jax.block_until_ready(start(*arguments)) for _ in range(2)]
    assert [int(np.asarray(p.ticket).reshape(-1)[0]) for p in pending] == [1, 2]
    run_anyway(done, pending[1])
    check_usage(buffer, "names epoch 2.*order of their starts")


def test_a_whole_operation_between_start_and_done_is_recorded(halves):
    buffer, start, _, fused, arguments = halves
    jax.block_until_ready(start(*arguments))
    counts = run_anyway(fused, *arguments)
    assert counts is None or (np.asarray(counts) == 0).all()
    check_usage(buffer, "dispatch, epoch 2.*when no start is open")


def test_a_pending_from_before_a_reset_is_recorded(halves):
    """Also where the epoch is open again: the check differs."""
    buffer, start, done, _, arguments = halves
    old = jax.block_until_ready(start(*arguments))
    buffer.reset()
    new = jax.block_until_ready(start(*arguments))
    tickets = [np.asarray(p.ticket).reshape(-1, 2) for p in (old, new)]
    assert (tickets[0][:, 0] == tickets[1][:, 0]).all()
    assert (tickets[0][:, 1] != tickets[1][:, 1]).all()
    run_anyway(done, old)
    check_usage(buffer, "names epoch 1")


LATE = cases.Case(name="late", T=45, H=64, K=3, E=12, R=2)


def late_program(buffer, through, operation, split):
    """Both operations and combine's gradient, with a place to sleep before one of them."""

    def place(name, value):
        return through("expert", value) if name == operation else value

    def program(x, topk_idx, topk_weights, g):
        send = ll_check.split_dispatch if split else ll_check.dispatch
        routed = send(buffer, LATE, "compact", place("dispatch", x), topk_idx, topk_weights)
        y = place("combine", gpu_world.leaky(routed.tokens))
        if split:
            return {"out": ll_check.split_combine(buffer, y, routed)}

        def bring_back(y, weights):
            edited = dataclasses.replace(routed, weights=weights)
            return jax_ep.low_latency_combine(buffer, y, edited)

        out, pull = jax.vjp(bring_back, y, routed.weights)
        d_y, d_weights = pull(place("combine_grad", g + out))
        return {"out": out, "d_y": d_y, "d_weights": d_weights}

    return jax.jit(programs.sharded(buffer, program, check_vma=False))


@pytest.mark.parametrize(
    ("operation", "split"),
    [
        ("dispatch", False),
        ("combine", False),
        ("combine_grad", False),
        ("dispatch", True),
        ("combine", True),
    ],
)
def test_late_beyond_the_deadline(operation, split, rng):
    gpu_world.require_cuda(2)
    inputs = cases.make_inputs(LATE, rng)
    g = cases.random_rows(rng, inputs.x.shape, LATE.dtype)
    through, armed = sleeper(LATE_RANK, 2.5 * TIMEOUT_S)
    with make_buffer(LATE, timeout_s=TIMEOUT_S) as buffer:
        run = late_program(buffer, through, operation, split)
        placed = gpu_world.put(buffer, *on_cpu.arguments_of(inputs), g)
        first = jax.tree.map(np.asarray, run(*placed))
        armed["on"] = True
        test_gpu_late.troubled(run, placed, f"EpTimeoutError: {operation}")
        with pytest.raises(jax_ep.EpTimeoutError, match=f"for rank {LATE_RANK}") as caught:
            buffer.check()
        error = caught.value
        assert (error.op, error.rank, error.peer) == (operation, 1 - LATE_RANK, LATE_RANK)
        armed["on"] = False
        assert test_gpu_late.troubled(run, placed, "EpTimeoutError") < TIMEOUT_S / 2
        buffer.reset()
        assert buffer.check() is None
        gpu_world.assert_same_bits(run(*placed), first)
        # No word of the aborted operations is taken for payload.
        other = cases.make_inputs(LATE, rng)
        dense = gpu_world.dense_leaky_layer(*on_cpu.arguments_of(other))
        out = run(*gpu_world.put(buffer, *on_cpu.arguments_of(other), g))["out"]
        np.testing.assert_allclose(out, dense, rtol=0, atol=1e-5)
        assert buffer.check() is None


def test_the_late_rank_is_the_one_that_was_waited_for(rng):
    gpu_world.require_cuda(2)
    inputs = cases.make_inputs(LATE, rng)
    through, armed = sleeper(LATE_RANK, 0.2)
    with make_buffer(LATE) as buffer:
        zero = jax_ep.LowLatencyStats.zeros(buffer.experts_per_rank, buffer.num_ranks)

        def program(x, *routes):
            x = through("expert", x)
            return ll_check.dispatch(buffer, LATE, "padded", x, *routes, stats=zero).stats.waited_ns

        run = jax.jit(programs.sharded(buffer, program, check_vma=False))
        placed = gpu_world.put(buffer, *on_cpu.arguments_of(inputs))
        jax.block_until_ready(run(*placed))
        armed["on"] = True
        waited = np.asarray(run(*placed)).reshape(2, 2) / 1e9
    assert 0.1 < waited[1 - LATE_RANK, LATE_RANK] < 2
    assert waited[LATE_RANK, 1 - LATE_RANK] < 0.1
    assert (np.diagonal(waited) == 0).all()


def test_texts_name_the_remedy(halves):
    buffer, start, _, fused, arguments = halves
    jax.block_until_ready(start(*arguments))
    run_anyway(fused, *arguments)
    with pytest.raises(jax_ep.EpUsageError) as raised:
        buffer.check()
    assert re.search(r"after=.*buffer\.reset\(\)", str(raised.value), re.DOTALL)
    with pytest.raises(jax.errors.JaxRuntimeError, match="EpUsageError"):
        jax.block_until_ready(fused(*arguments))
