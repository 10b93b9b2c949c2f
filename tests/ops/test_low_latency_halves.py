"""Starts and dones: interleaved, in any order, across programs, once each, and no more than two."""

import functools
import re
import time

import cases
import jax
import jax.numpy as jnp
import ll_check
import numpy as np
import programs
import pytest
from ll_check import TINY

import jax_ep

F = 40  # the width of the matmul between the halves; no other array of these programs has it


def arguments_of(inputs):
    return inputs.x, inputs.topk_idx, inputs.topk_weights


def expected_sum(inputs):
    """Experts that change nothing: every token times the sum of its weights."""
    named = ll_check.case_check.oracle.clean(
        ll_check.case_check.by_rank(inputs.topk_idx, TINY), TINY.E
    )[0].reshape(inputs.topk_idx.shape)
    return inputs.x * (inputs.topk_weights * (named >= 0)).sum(1, keepdims=True)


def two_micro_batches(buffer, first, second):
    """Start A, start B, done A, done B, twice: dispatch and combine."""
    a = jax_ep.low_latency_dispatch_start(buffer, *first)
    b = jax_ep.low_latency_dispatch_start(buffer, *second, after=a)
    routed_a = jax_ep.low_latency_dispatch_done(buffer, a, after=b)
    routed_b = jax_ep.low_latency_dispatch_done(buffer, b, after=routed_a)
    a = jax_ep.low_latency_combine_start(buffer, routed_a.tokens, routed_a)
    b = jax_ep.low_latency_combine_start(buffer, 2 * routed_b.tokens, routed_b, after=a)
    out_a = jax_ep.low_latency_combine_done(buffer, a, after=b)
    return out_a, jax_ep.low_latency_combine_done(buffer, b, after=out_a)


def test_two_micro_batches_interleaved(backend, rng):
    with ll_check.make_buffer(TINY, backend) as buffer:

        def program(*arrays):
            return two_micro_batches(buffer, arrays[:3], arrays[3:])

        run = jax.jit(programs.sharded(buffer, program))
        for _ in range(3):
            first, second = cases.make_inputs(TINY, rng), cases.make_inputs(TINY, rng)
            out_a, out_b = run(*arguments_of(first), *arguments_of(second))
            np.testing.assert_allclose(out_a, expected_sum(first), rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(out_b, 2 * expected_sum(second), rtol=1e-5, atol=1e-5)


def test_dones_in_the_other_order_and_a_fused_one_between(rng):
    """Credits count upwards whatever is done first; afterwards the window goes on as before."""
    with ll_check.make_buffer(TINY, "native") as buffer:

        def program(*arrays):
            first, second = arrays[:3], arrays[3:]
            a = jax_ep.low_latency_dispatch_start(buffer, *first)
            b = jax_ep.low_latency_dispatch_start(buffer, *second, after=a)
            routed_b = jax_ep.low_latency_dispatch_done(buffer, b)
            routed_a = jax_ep.low_latency_dispatch_done(buffer, a, after=routed_b)
            c = jax_ep.low_latency_dispatch_start(buffer, *first, after=routed_a)
            fused = jax_ep.low_latency_dispatch(buffer, *second, after=c)
            routed_c = jax_ep.low_latency_dispatch_done(buffer, c, after=fused)
            outs, last = [], None
            for routed in (routed_a, routed_b, routed_c, fused):
                last = jax_ep.low_latency_combine(buffer, routed.tokens, routed, after=last)
                outs.append(last)
            return outs

        run = jax.jit(programs.sharded(buffer, program))
        for _ in range(4):
            first, second = cases.make_inputs(TINY, rng), cases.make_inputs(TINY, rng)
            outs = run(*arguments_of(first), *arguments_of(second))
            for out, inputs in zip(outs, (first, second, first, second), strict=True):
                np.testing.assert_allclose(out, expected_sum(inputs), rtol=1e-5, atol=1e-5)
        assert buffer.stats()["dispatch_epochs"] == 4 * 4


def test_a_pending_may_leave_one_program_for_another(backend, rng):
    inputs = cases.make_inputs(TINY, rng)
    with ll_check.make_buffer(TINY, backend) as buffer:
        start, done = split_programs(buffer)
        out = done(start(*arguments_of(inputs)))
        np.testing.assert_allclose(out, expected_sum(inputs), rtol=1e-5, atol=1e-5)


def split_programs(buffer):
    """A start and its done as two compiled functions; scalars leave shard_map as ``[1]``."""

    def start(*arrays):
        pending = jax_ep.low_latency_dispatch_start(buffer, *arrays)
        return jax.tree.map(lambda leaf: leaf[None], pending)

    def done(pending):
        pending = jax.tree.map(lambda leaf: leaf[0], pending)
        routed = jax_ep.low_latency_dispatch_done(buffer, pending)
        return jax_ep.low_latency_combine(buffer, routed.tokens, routed)

    return tuple(jax.jit(programs.sharded(buffer, function)) for function in (start, done))


def failure(run, *arguments) -> str:
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        jax.block_until_ready(run(*arguments))
    return str(raised.value)


def test_a_used_pending_is_refused_and_the_buffer_goes_on(rng):
    inputs = cases.make_inputs(TINY, rng)
    with ll_check.make_buffer(TINY, "native") as buffer:
        start, done = split_programs(buffer)
        pending = start(*arguments_of(inputs))
        jax.block_until_ready(done(pending))
        text = failure(done, pending)
        assert re.search("(?s)EpUsageError: dispatch done.*epoch 1.*done before", text)
        out = done(start(*arguments_of(inputs)))
        np.testing.assert_allclose(out, expected_sum(inputs), rtol=1e-5, atol=1e-5)
        assert buffer.check() is None


def test_a_pending_from_before_a_reset_is_refused(rng):
    """Also where the epoch is open again: the check differs."""
    inputs = cases.make_inputs(TINY, rng)
    with ll_check.make_buffer(TINY, "native") as buffer:
        start, done = split_programs(buffer)
        old = jax.block_until_ready(start(*arguments_of(inputs)))
        buffer.reset()
        new = jax.block_until_ready(start(*arguments_of(inputs)))
        assert np.array_equal(np.asarray(old.ticket)[:, 0], np.asarray(new.ticket)[:, 0])
        assert "reset() has forgotten it" in failure(done, old)
        np.testing.assert_allclose(done(new), expected_sum(inputs), rtol=1e-5, atol=1e-5)


def test_a_third_start_fails_at_once_and_overwrites_nothing(rng):
    batches = [cases.make_inputs(TINY, rng) for _ in range(3)]
    with ll_check.make_buffer(TINY, "native") as buffer:
        start, done = split_programs(buffer)
        pending = [jax.block_until_ready(start(*arguments_of(b))) for b in batches[:2]]
        text = failure(start, *arguments_of(batches[2]))
        assert re.search("(?s)EpUsageError: dispatch, epoch 3.*start of epoch 1", text)
        assert "after=" in text
        assert "reset()" in text
        for b, p in zip(batches, pending, strict=False):
            np.testing.assert_allclose(done(p), expected_sum(b), rtol=1e-5, atol=1e-5)
        out = done(start(*arguments_of(batches[2])))
        np.testing.assert_allclose(out, expected_sum(batches[2]), rtol=1e-5, atol=1e-5)


def test_a_fused_operation_counts_as_one_on_its_way(rng):
    """Two fused ones after an open start would write the start's buffer: the second fails."""
    inputs = cases.make_inputs(TINY, rng)
    with ll_check.make_buffer(TINY, "native") as buffer:
        start, done = split_programs(buffer)

        def fused(*arrays):
            return jax_ep.low_latency_dispatch(buffer, *arrays).counts

        run = jax.jit(programs.sharded(buffer, fused))
        pending = jax.block_until_ready(start(*arguments_of(inputs)))
        jax.block_until_ready(run(*arguments_of(inputs)))
        assert "the start of epoch 1 has had no done" in failure(run, *arguments_of(inputs))
        np.testing.assert_allclose(done(pending), expected_sum(inputs), rtol=1e-5, atol=1e-5)
        jax.block_until_ready(run(*arguments_of(inputs)))


def test_three_starts_in_one_program_fail(rng):
    inputs = cases.make_inputs(TINY, rng)
    with ll_check.make_buffer(TINY, "native") as buffer:

        def program(*arrays):
            pending, last = [], None
            for _ in range(3):
                last = jax_ep.low_latency_dispatch_start(buffer, *arrays, after=last)
                pending.append(last)
            outs = [jax_ep.low_latency_dispatch_done(buffer, p, after=last) for p in pending]
            return sum(routed.counts for routed in outs)

        run = jax.jit(programs.sharded(buffer, program))
        assert "EpUsageError: dispatch, epoch 3" in failure(run, *arguments_of(inputs))
        buffer.reset()
        start, done = split_programs(buffer)
        out = done(start(*arguments_of(inputs)))
        np.testing.assert_allclose(out, expected_sum(inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("half", ["dispatch", "combine"])
def test_halves_refuse_gradients_and_vmap(backend, half, rng):
    inputs = cases.make_inputs(TINY, rng)
    with ll_check.make_buffer(TINY, backend) as buffer:

        def program(x, topk_idx, topk_weights):
            if half == "dispatch":
                return ll_check.split_dispatch(
                    buffer, TINY, "padded", x, topk_idx, topk_weights
                ).tokens
            routed = jax_ep.low_latency_dispatch(buffer, x, topk_idx, topk_weights)
            return ll_check.split_combine(buffer, routed.tokens, routed)

        run = programs.sharded(buffer, program)
        name = f"low_latency_{half}_start"

        def loss(x):
            return jnp.sum(run(x, inputs.topk_idx, inputs.topk_weights))

        with pytest.raises(jax_ep.EpUsageError, match=f"{name} cannot be differentiated.*fused"):
            jax.jit(jax.grad(loss)).trace(inputs.x)
        batched = np.stack([inputs.x, inputs.x])
        with pytest.raises(jax_ep.EpUsageError, match=f"{name} cannot be vmapped.*Python loop"):
            jax.jit(jax.vmap(run, in_axes=(0, None, None))).trace(
                batched, inputs.topk_idx, inputs.topk_weights
            )


def shared_expert(x, shared, num_times):
    """A chain of matmuls of width F."""
    return jax.lax.fori_loop(
        0, num_times, lambda _, h: jnp.tanh(h @ shared), x @ shared[: x.shape[1]]
    )


def test_a_matmul_between_the_halves_stays_between_them_in_the_hlo():
    """order_after puts it behind the start, after= before the done."""
    with ll_check.make_buffer(TINY, "native") as buffer:

        def program(x, topk_idx, topk_weights, shared):
            pending = jax_ep.low_latency_dispatch_start(buffer, x, topk_idx, topk_weights)
            beside = jnp.tanh(jax_ep.order_after(x, pending) @ shared)
            routed = jax_ep.low_latency_dispatch_done(buffer, pending, after=beside)
            return jax_ep.low_latency_combine(buffer, routed.tokens, routed), beside

        shapes = (
            jax.ShapeDtypeStruct((TINY.R * TINY.T, TINY.H), jnp.float32),
            jax.ShapeDtypeStruct((TINY.R * TINY.T, TINY.K), jnp.int32),
            jax.ShapeDtypeStruct((TINY.R * TINY.T, TINY.K), jnp.float32),
            jax.ShapeDtypeStruct((TINY.H, F), jnp.float32),
        )
        rows = programs.PartitionSpec("expert")
        run = programs.sharded(
            buffer, program, in_specs=(rows, rows, rows, programs.PartitionSpec())
        )
        text = jax.jit(run).lower(*shapes).compile().as_text()
    assert "is_scheduled=true" in text
    entry = text[text.index("ENTRY") :].splitlines()
    start, done = (
        index
        for half in ("start", "done")
        for index, line in enumerate(entry)
        if f'custom_call_target="jax_ep_ll_dispatch_{half}"' in line
    )
    matmuls = [i for i, line in enumerate(entry) if re.search(rf"= f32\[{TINY.T},{F}\]", line)]
    assert matmuls
    assert all(start < index < done for index in matmuls), "\n".join(entry)
    assert text.count("custom_call_has_side_effect=true") == 2


def test_order_after_changes_no_bit(backend, rng):
    inputs = cases.make_inputs(TINY, rng)
    strange = [-0.0, np.inf, -np.inf, 1e-40, 3.0e38, np.nan]
    inputs.x[0, : len(strange)] = strange
    with ll_check.make_buffer(TINY, backend) as buffer:

        def program(*arrays):
            routed = ll_check.dispatch(buffer, TINY, "padded", *arrays, after=arrays[0])
            return jax_ep.order_after(arrays[0], routed)

        seen = np.asarray(jax.jit(programs.sharded(buffer, program))(*arguments_of(inputs)))
    normal = np.abs(inputs.x) != np.float32(1e-40)  # XLA:CPU flushes those in any arithmetic
    assert seen[normal].tobytes() == inputs.x[normal].tobytes()


def test_the_wait_shrinks_by_what_runs_between_the_halves(rng):
    """One rank sends 0.3 s late. The others compute meanwhile, or wait for it when fused."""
    inputs, late = cases.make_inputs(TINY, rng), int(rng.integers(TINY.R))
    shared = (rng.normal(size=(256, 256)) / 16).astype(np.float32)
    with ll_check.make_buffer(TINY, "native") as buffer:
        zero = jax_ep.LowLatencyStats.zeros(buffer.experts_per_rank, buffer.num_ranks)

        def program(split, num_times, *arrays):
            x = arrays[0]
            if split:
                pending = jax_ep.low_latency_dispatch_start(buffer, *arrays)
                beside = shared_expert(jax_ep.order_after(x, pending), shared, num_times[0])
                routed = jax_ep.low_latency_dispatch_done(buffer, pending, stats=zero, after=beside)
            else:
                beside = shared_expert(x, shared, num_times[0])
                routed = ll_check.dispatch(
                    buffer, TINY, "padded", *arrays, stats=zero, after=beside
                )
            return routed.stats.waited_ns, beside

        def waited(split, num_times):
            """Seconds that each rank waited for the late one, and those that the call took."""
            counts = np.full(TINY.R, num_times, np.int32)
            function = runs[split]
            begin = time.monotonic()
            times, _ = jax.block_until_ready(function(counts, *arguments_of(inputs)))
            return ll_check.case_check.by_rank(times, TINY)[:, late] / 1e9, time.monotonic() - begin

        runs = {
            split: jax.jit(programs.sharded(buffer, functools.partial(program, split)))
            for split in (True, False)
        }
        num_times = 1000
        while waited(True, num_times)[1] < 0.6 or waited(False, num_times)[1] < 0.6:
            num_times *= 2
        others = np.arange(TINY.R) != late
        hidden = {}
        for split in (True, False):
            buffer._native.set_fault(buffer.id, "late", late, microseconds=300_000)
            hidden[split] = waited(split, num_times)[0][others]
    assert (hidden[False] > 0.25).all(), hidden
    assert (hidden[True] < 0.15).all(), hidden


def test_halves_in_a_scan(backend, rng):
    """One call site, many epochs; and no effect that would keep scan or checkpoint from it."""
    inputs = [cases.make_inputs(TINY, rng) for _ in range(5)]
    stacked = [np.stack(arrays) for arrays in zip(*map(arguments_of, inputs), strict=True)]
    with ll_check.make_buffer(TINY, backend) as buffer:

        def program(*stacks):
            def body(carry, arrays):
                routed = ll_check.split_dispatch(buffer, TINY, "padded", *arrays)
                return carry, ll_check.split_combine(buffer, routed.tokens, routed)

            return jax.lax.scan(jax.checkpoint(body), None, stacks)[1]

        spec = programs.PartitionSpec(None, "expert")
        run = programs.sharded(buffer, program, in_specs=spec, out_specs=spec)
        assert not jax.make_jaxpr(run)(*stacked).effects
        outs = jax.jit(run)(*stacked)
    for out, each in zip(outs, inputs, strict=True):
        np.testing.assert_allclose(out, expected_sum(each), rtol=1e-5, atol=1e-5)
