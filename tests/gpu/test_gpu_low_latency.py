"""Low-latency operations on GPUs: against the oracle, bit for bit as on CPU, gradients, replays."""

import dataclasses

import cases
import gpu_world
import jax
import jax.numpy as jnp
import ll_check
import numpy as np
import programs
import pytest
import test_low_latency as on_cpu
from jax.sharding import PartitionSpec

import jax_ep
from jax_ep import _native

Case = cases.Case
# Padded outputs have E_l * R * T rows, which the oracle makes as well.
LARGE = (
    Case(name="one_token", T=1, H=7168, K=8, E=288, R=2, dtype="bfloat16"),
    Case(name="one_expert_each", T=128, H=7168, K=1, E=8, R=2, dtype="bfloat16"),
    Case(name="seven_k22", T=7, H=3584, K=22, E=60, R=2, dtype="bfloat16"),
    Case(name="decode", T=128, H=1024, K=8, E=60, R=2, dtype="bfloat16"),
    Case(name="wide_float32", T=33, H=7168, K=8, E=32, R=2),
    Case(name="very_wide", T=5, H=40_008, K=6, E=24, R=2, dtype="float16"),
    Case(name="five_hundred", T=512, H=1024, K=1, E=8, R=2, dtype="float16"),
)
ON_ONE_RANK = ("one_rank", "out_of_range", "duplicates", "no_tokens")


def _table():
    small = [case for case in on_cpu.SMALL if case.T > 0 or gpu_world.EMPTY_ARRAYS]
    rows = [(case, layout, 2) for case in (*LARGE, *small) for layout in ll_check.LAYOUTS]
    rows += [(case, "compact", 2) for case in on_cpu.CAPPED]
    one = [case for case in small if case.name in ON_ONE_RANK]
    rows += [(case, layout, 1) for case in one for layout in ll_check.LAYOUTS]
    rows.append((on_cpu.CAPPED[0], "compact", 1))
    return rows


TABLE = _table()


def make_buffer(case, platform="cuda", **changes) -> jax_ep.Buffer:
    return gpu_world.make_buffer(case, platform, mode="low_latency", **changes)


def specified(case, problem, results) -> dict[str, np.ndarray]:
    """Results without the rows past the counts."""
    found = {name: np.asarray(array) for name, array in results.items()}
    tokens = found["tokens"].reshape(case.R, -1, case.H)
    return found | {"tokens": tokens[problem.truth.holds_token]}


@pytest.mark.parametrize(
    ("case", "layout", "num_ranks"), TABLE, ids=[f"{c.name}-{how}-{r}" for c, how, r in TABLE]
)
def test_case(case, layout, num_ranks, rng):
    """Fused with both gradients, and halves; twice, so that both buffers of the window are used."""
    case = gpu_world.on_ranks(case, num_ranks)
    problem = ll_check.make_problem(case, layout, rng)
    results = {}
    for platform in ("cuda", "cpu"):
        with make_buffer(case, platform) as buffer:
            arguments = gpu_world.put(buffer, *problem.arguments())
            run = ll_check.everything(buffer, case, layout)
            results[platform] = run(*arguments)
            ll_check.check_against_oracle(case, problem, results[platform])
            check_faults(buffer, problem.num_faults)
            if platform == "cpu":
                continue
            halves = ll_check.in_halves(buffer, case, layout)
            results["halves"] = jax.block_until_ready(halves(*arguments))
            again = jax.block_until_ready(run(*arguments))
            check_faults(buffer, 2 * problem.num_faults)
    seen = {name: specified(case, problem, found) for name, found in results.items()}
    gpu_world.assert_same_bits(seen["cuda"], seen["cpu"])
    gpu_world.assert_same_bits(specified(case, problem, again), seen["cpu"], "again:")
    whole = {name: seen["cuda"][name] for name in seen["halves"]}
    gpu_world.assert_same_bits(seen["halves"], whole, "halves:")


def check_faults(buffer, count):
    if count:
        with pytest.raises(jax_ep.EpDataError) as raised:
            buffer.check()
        assert raised.value.count == count
    assert buffer.check() is None


def test_native_is_what_auto_chooses(num_gpus):
    case = gpu_world.on_ranks(on_cpu.SMALL[0], num_gpus)
    assert _native.serves("cuda", "low_latency")
    config = programs.make_config(case, mode="low_latency")
    with jax_ep.Buffer(gpu_world.mesh(expert=num_gpus), "expert", config) as buffer:
        assert buffer.backend == "native"
        hint = jax_ep.get_low_latency_rdma_size_hint(
            case.T,
            case.H,
            num_gpus,
            case.E,
            num_experts_per_tok=case.K,
            dtype=jnp.dtype(case.dtype),
        )
        assert buffer.window_bytes < hint


LAYERS = Case(name="layers", T=33, H=64, K=3, E=8, R=2)
NUM_STEPS = 200


def layers(buffer, layout, halves, x, topk_idx, topk_weights):
    """Three layers, more operations than XLA asks for before it captures a graph."""
    for _ in range(3):
        dispatch = ll_check.split_dispatch if halves else ll_check.dispatch
        routed = dispatch(buffer, LAYERS, layout, x, topk_idx, topk_weights)
        combine = ll_check.split_combine if halves else jax_ep.low_latency_combine
        x = combine(buffer, gpu_world.leaky(routed.tokens), routed)
    return x


@pytest.mark.parametrize("halves", [False, True], ids=["whole", "halves"])
@pytest.mark.parametrize("layout", ll_check.LAYOUTS)
def test_replays_in_a_scan_have_the_bits_of_the_cpu(layout, halves, num_gpus, rng):
    """Fresh inputs in every step, most of which no handler sees."""
    case = gpu_world.on_ranks(LAYERS, num_gpus)
    steps = [cases.make_inputs(case, rng) for _ in range(NUM_STEPS)]
    stacked = [np.stack([getattr(s, name) for s in steps]) for name in ("x", "topk_idx")]
    stacked.append(np.stack([s.topk_weights for s in steps]))
    spec = PartitionSpec(None, "expert")
    outs = {}
    for platform in ("cuda", "cpu"):
        with make_buffer(case, platform) as buffer:

            def program(*stacks, buffer=buffer):
                def body(carry, arrays):
                    return carry, layers(buffer, layout, halves, *arrays)

                return jax.lax.scan(body, None, stacks)[1]

            run = jax.jit(programs.sharded(buffer, program, in_specs=spec, out_specs=spec))
            outs[platform] = {"out": np.asarray(run(*stacked))}
            assert buffer.check() is None
            if platform == "cuda":
                stats = buffer.stats()
                assert stats["dispatch_epochs"] == stats["combine_epochs"] == 3 * NUM_STEPS
                assert stats["captured_launches"] > 0, "XLA captured no graph"
    gpu_world.assert_same_bits(outs["cuda"], outs["cpu"])
    assert np.isfinite(outs["cuda"]["out"]).all()


@pytest.mark.parametrize("layout", ll_check.LAYOUTS)
def test_gradients_of_checkpointed_layers_have_the_bits_of_the_cpu(layout, num_gpus, rng):
    case = gpu_world.on_ranks(LAYERS, num_gpus)
    inputs = cases.make_inputs(case, rng)
    g = cases.random_rows(rng, inputs.x.shape, case.dtype)
    arguments = (inputs.x, inputs.topk_idx, inputs.topk_weights, g)
    results = {}
    for platform in ("cuda", "cpu"):
        with make_buffer(case, platform) as buffer:

            def program(x, topk_idx, topk_weights, g, buffer=buffer):
                def out(x, topk_weights):
                    return layers(buffer, layout, False, x, topk_idx, topk_weights)

                primal, pull = jax.vjp(jax.checkpoint(out), x, topk_weights)
                d_x, d_weights = pull(g)
                return {"out": primal, "d_x": d_x, "d_weights": d_weights}

            run = jax.jit(programs.sharded(buffer, program))
            found = run(*gpu_world.put(buffer, *arguments))
            results[platform] = {name: np.asarray(array) for name, array in found.items()}
            assert buffer.check() is None
    gpu_world.assert_same_bits(results["cuda"], results["cpu"])


def test_vmap_is_sequential_and_right(num_gpus, rng):
    case = gpu_world.on_ranks(LAYERS, num_gpus)
    batch = [cases.make_inputs(case, rng) for _ in range(3)]
    stacked = [np.stack([getattr(i, name) for i in batch]) for name in ("x", "topk_idx")]
    stacked.append(np.stack([i.topk_weights for i in batch]))
    spec = PartitionSpec(None, "expert")
    with make_buffer(case) as buffer:

        def layer(*arrays):
            routed = ll_check.dispatch(buffer, case, "padded", *arrays)
            return jax_ep.low_latency_combine(buffer, gpu_world.leaky(routed.tokens), routed)

        run = programs.sharded(buffer, jax.vmap(layer), in_specs=spec, out_specs=spec)
        out = np.asarray(jax.jit(run)(*stacked))
    dense = jax.vmap(gpu_world.dense_leaky_layer)(*stacked)
    np.testing.assert_allclose(out, dense, rtol=0, atol=1e-5)


@pytest.mark.parametrize("split", [False, True], ids=["whole", "halves"])
@pytest.mark.parametrize("layout", ll_check.LAYOUTS)
def test_stats_add_up(layout, split, num_gpus, rng):
    """Two operations' counts, dropped rows left out, and no time waited for oneself."""
    load = 0.8 if layout == "compact" else None
    case = Case(name="stats", T=8, H=16, K=3, E=4 * num_gpus, R=num_gpus, load=load)
    problems = [ll_check.make_problem(case, layout, rng) for _ in range(2)]
    with make_buffer(case) as buffer:
        send = ll_check.split_dispatch if split else ll_check.dispatch

        def program(stats, *arrays):
            return send(buffer, case, layout, *arrays, stats=stats).stats

        run = jax.jit(programs.sharded(buffer, program))
        first = np.full(case.E, 2**31 - 2, np.int32), np.full(case.R**2, 7, np.uint32)
        stats = jax_ep.LowLatencyStats(*gpu_world.put(buffer, *first))
        for problem in problems:
            stats = run(stats, *gpu_world.put(buffer, *problem.arguments()[:3]))
        stats = jax.device_get(stats)
    received = sum(problem.truth.group_sizes for problem in problems).reshape(-1)
    counted = stats.tokens_per_expert.view(np.uint32) - first[0].view(np.uint32)
    np.testing.assert_array_equal(counted, received)
    waited = (stats.waited_ns - first[1]).reshape(case.R, case.R)
    assert (np.diagonal(waited) == 0).all()
    assert (waited < 2e9).all()


def test_the_token_of_after_is_zero(num_gpus, rng):
    """Two chains of layers that share no data, one behind the other, and no bit of x changed."""
    case = gpu_world.on_ranks(LAYERS, num_gpus)
    inputs = [cases.make_inputs(case, rng) for _ in range(2)]
    arguments = [a for i in inputs for a in (i.x, i.topk_idx, i.topk_weights)]
    with make_buffer(case) as buffer:

        def program(*arrays):
            first = ll_check.dispatch(buffer, case, "padded", *arrays[:3])
            out = jax_ep.low_latency_combine(buffer, gpu_world.leaky(first.tokens), first)
            second = ll_check.dispatch(buffer, case, "compact", *arrays[3:], after=out)
            rows = gpu_world.leaky(second.tokens)
            last = jax_ep.low_latency_combine(buffer, rows, second, after=out)
            pending = jax_ep.low_latency_dispatch_start(buffer, *arrays[:3], after=last)
            same = jax_ep.order_after(arrays[0], pending)
            done = jax_ep.low_latency_dispatch_done(buffer, pending, after=same)
            tokens = jnp.stack([first.token, second.token, pending.token, done.token])
            return out, last, same, tokens

        run = jax.jit(programs.sharded(buffer, program))
        for _ in range(8):  # a few calls, then replays
            out, last, same, tokens = run(*gpu_world.put(buffer, *arguments))
            assert (np.asarray(tokens) == 0).all()
            assert np.asarray(same).tobytes() == inputs[0].x.tobytes()
            for seen, of in ((out, inputs[0]), (last, inputs[1])):
                dense = gpu_world.dense_leaky_layer(of.x, of.topk_idx, of.topk_weights)
                np.testing.assert_allclose(seen, dense, rtol=0, atol=1e-5)
        assert buffer.check() is None


def test_any_number_of_multiprocessors_gives_the_same_bits(num_gpus, rng):
    case = dataclasses.replace(gpu_world.on_ranks(LAYERS, num_gpus), T=128, dtype="bfloat16")
    problem = ll_check.make_problem(case, "padded", rng)
    results = []
    for num_sms in (1, 16, None):
        with make_buffer(case, num_sms=num_sms) as buffer:
            run = ll_check.everything(buffer, case, "padded")
            results.append(run(*gpu_world.put(buffer, *problem.arguments())))
            assert buffer.check() is None
    seen = [specified(case, problem, found) for found in results]
    ll_check.check_against_oracle(case, problem, results[0])
    for other in seen[1:]:
        gpu_world.assert_same_bits(other, seen[0])
