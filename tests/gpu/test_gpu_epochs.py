"""Many epochs with sizes that change from one to the next, each checked on the device."""

import dataclasses
import time

import cases
import gpu_world
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

import jax_ep

CASE = cases.Case(name="epochs", T=96, H=128, K=4, E=16, R=2, dtype="bfloat16")
NUM_STEPS = 10_000


def make_soak(buffer, case, num_steps):
    """A scan of dispatch and combine; tokens past a random number are nobody's, rows are fresh.

    Expert e multiplies its rows by a power of two of its own, so that a row that went to the wrong
    expert, or one of an earlier epoch, gives another result.
    """

    def factors_of(experts):
        return jnp.exp2((experts % 5).astype(jnp.float32) - 2)

    def low_latency(x, topk_idx, topk_weights):
        """Whole with padded rows, then in halves with compact ones: NaN where they differ."""
        first = jax.lax.axis_index("expert") * buffer.experts_per_rank
        factors = factors_of(first + jnp.arange(buffer.experts_per_rank)).astype(x.dtype)
        routed = jax_ep.low_latency_dispatch(buffer, x, topk_idx, topk_weights)
        out = jax_ep.low_latency_combine(buffer, routed.tokens * factors[:, None, None], routed)
        arrays = (x, topk_idx, topk_weights)
        pending = jax_ep.low_latency_dispatch_start(buffer, *arrays, layout="compact", after=out)
        routed = jax_ep.low_latency_dispatch_done(buffer, pending)
        rows = len(routed.tokens)
        factors = jnp.repeat(factors, routed.counts, total_repeat_length=rows)
        pending = jax_ep.low_latency_combine_start(buffer, routed.tokens * factors[:, None], routed)
        again = jax_ep.low_latency_combine_done(buffer, pending)
        return jnp.where(out == again, out, jnp.nan)

    def one(x, topk_idx, topk_weights):
        if buffer.config.mode == "low_latency":
            return low_latency(x, topk_idx, topk_weights)
        routed = programs.dispatch(buffer, case, x, topk_idx, topk_weights)
        first = jax.lax.axis_index("expert") * buffer.experts_per_rank
        factors = jnp.repeat(
            factors_of(first + jnp.arange(buffer.experts_per_rank)),
            routed.group_sizes,
            total_repeat_length=routed.tokens.shape[0],
        )
        y = routed.tokens * factors[:, None].astype(x.dtype)
        return jax_ep.combine(buffer, y, routed)

    def dense(x, topk_idx, topk_weights):
        terms = jnp.where(topk_idx >= 0, topk_weights * factors_of(topk_idx), 0)
        return x.astype(jnp.float32) * terms.sum(-1, keepdims=True)

    def soak(x, first_expert, topk_weights, keys):
        def body(worst, step_and_key):
            step, key = step_and_key
            rank = jax.lax.axis_index("expert")
            live = (key >> (4 * rank)) % (2 * case.T)  # every other time all of them, about
            spread = case.E // case.K
            experts = (first_expert[:, None] + key % 97 + spread * jnp.arange(case.K)) % case.E
            here = jnp.arange(case.T)[:, None] < live
            topk_idx = jnp.where(here, experts, -1).astype(jnp.int32)
            rows = x * (1 + (step % 7)).astype(x.dtype)
            out = one(rows, topk_idx, topk_weights)
            error = gpu_world.worst_error(out, dense(rows, topk_idx, topk_weights))
            return jnp.maximum(worst, error[None]), None

        worst = jax.lax.pcast(jnp.zeros(1), "expert", to="varying")
        return jax.lax.scan(body, worst, (jnp.arange(num_steps), keys))[0]

    specs = (*[jax.P("expert")] * 3, jax.P())
    return jax.jit(programs.sharded(buffer, soak, in_specs=specs))


def soak_arguments(buffer, case, num_steps, rng):
    inputs = cases.make_inputs(case, rng)
    weights = inputs.topk_weights / inputs.topk_weights.sum(1, keepdims=True)
    first_expert = rng.integers(case.E, size=len(inputs.x)).astype(np.int32)
    keys = jnp.asarray(rng.integers(2**31, size=num_steps), jnp.int32)
    return *gpu_world.put(buffer, inputs.x, first_expert, weights), keys


@pytest.mark.parametrize("chunk", [None, 20])
def test_ten_thousand_epochs(num_gpus, rng, chunk):
    case = dataclasses.replace(gpu_world.on_ranks(CASE, num_gpus), chunk=chunk)
    epochs_per_op = 1 if chunk is None else -(-case.T // chunk)
    num_steps = NUM_STEPS // epochs_per_op
    with gpu_world.make_buffer(case) as buffer:
        soak = make_soak(buffer, case, num_steps)
        arguments = soak_arguments(buffer, case, num_steps, rng)
        worst = np.asarray(soak(*arguments))
        assert worst.max() < gpu_world.TOLERANCE[case.dtype]
        start = time.perf_counter()
        again = np.asarray(soak(*arguments))
        took = time.perf_counter() - start
        print(f"{1e6 * took / num_steps:.1f} us a step of dispatch and combine")
        np.testing.assert_array_equal(again, worst)
        assert buffer.check() is None
        stats = buffer.stats()
    assert stats["dispatch_epochs"] == stats["combine_epochs"] == 2 * num_steps * epochs_per_op


def test_the_cost_of_an_epoch_stays_flat(num_gpus, rng):
    """The last 2,000 of 12,000 epochs take as long as the first after those that warm up."""
    case, num_steps = gpu_world.on_ranks(CASE, num_gpus), NUM_STEPS // 5
    with gpu_world.make_buffer(case) as buffer:
        soak = make_soak(buffer, case, num_steps)
        arguments = soak_arguments(buffer, case, num_steps, rng)
        seconds = []
        for _ in range(6):
            start = time.perf_counter()
            jax.block_until_ready(soak(*arguments))
            seconds.append(time.perf_counter() - start)
        assert buffer.check() is None
    microseconds = [1e6 * took / num_steps for took in seconds[1:]]
    print(f"us a step: {', '.join(f'{us:.1f}' for us in microseconds)}")
    assert max(microseconds) < 1.2 * min(microseconds)


def test_sizes_of_calls_may_vary(num_gpus, rng):
    """One buffer, calls with other T in any order, with and without several epochs."""
    largest = dataclasses.replace(gpu_world.on_ranks(CASE, num_gpus), T=257, chunk=50)
    with gpu_world.make_buffer(largest) as buffer:

        def layer(x, topk_idx, topk_weights):
            case = dataclasses.replace(largest, T=x.shape[0])
            return gpu_world.leaky_layer(buffer, case, x, topk_idx, topk_weights)

        run = jax.jit(programs.sharded(buffer, layer))
        sizes = [1, 5, 64, 257, 50, 51, 100, 1, 257] + ([0, 0] if gpu_world.EMPTY_ARRAYS else [])
        for num_tokens in rng.permutation(sizes).tolist():
            case = dataclasses.replace(largest, T=num_tokens)
            inputs = cases.make_inputs(case, rng)
            arguments = (inputs.x, inputs.topk_idx, inputs.topk_weights)
            out = run(*gpu_world.put(buffer, *arguments))
            expected = gpu_world.dense_leaky_layer(
                jnp.asarray(inputs.x, jnp.float32), inputs.topk_idx, inputs.topk_weights
            )
            error = gpu_world.worst_error(jnp.asarray(np.asarray(out)), expected)
            assert error < gpu_world.TOLERANCE[case.dtype]
        assert buffer.check() is None


def test_two_buffers_alternate(num_gpus, rng):
    """Two buffers of different shapes in one scan, each result checked against its own layer."""
    first = gpu_world.on_ranks(CASE, num_gpus)
    second = dataclasses.replace(first, name="second", T=40, H=256, K=2, dtype="float32", chunk=16)
    with gpu_world.make_buffer(first) as one, gpu_world.make_buffer(second) as other:
        assert one.id != other.id

        def layers(x, idx, weights, x2, idx2, weights2):
            def body(worst, step):
                scale = 1 + step % 5
                rows, rows2 = x * scale.astype(x.dtype), x2 * scale.astype(x2.dtype)
                out = gpu_world.leaky_layer(one, first, rows, idx, weights)
                out2 = gpu_world.leaky_layer(other, second, rows2, idx2, weights2)
                expected = gpu_world.dense_leaky_layer(rows.astype(jnp.float32), idx, weights)
                expected2 = gpu_world.dense_leaky_layer(rows2, idx2, weights2)
                errors = [
                    gpu_world.worst_error(out, expected),
                    gpu_world.worst_error(out2, expected2),
                ]
                return jnp.maximum(worst, jnp.stack(errors)[None]), None

            worst = jax.lax.pcast(jnp.zeros((1, 2)), "expert", to="varying")
            return jax.lax.scan(body, worst, jnp.arange(500))[0]

        arguments = []
        for buffer, case in ((one, first), (other, second)):
            inputs = cases.make_inputs(case, rng)
            arguments += gpu_world.put(buffer, inputs.x, inputs.topk_idx, inputs.topk_weights)
        worst = np.asarray(jax.jit(programs.sharded(one, layers))(*arguments)).max(0)
        assert one.check() is None
        assert other.check() is None
    assert worst[0] < gpu_world.TOLERANCE[first.dtype]
    assert worst[1] < gpu_world.TOLERANCE[second.dtype]
