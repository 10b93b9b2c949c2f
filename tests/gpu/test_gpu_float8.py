"""Quantised dispatches on GPUs have the bits of those on CPUs, which are tested by the formula."""

import dataclasses

import case_check
import cases
import float8_check
import gpu_world
import jax
import jax.numpy as jnp
import ll_check
import numpy as np
import programs
import pytest
from jax.sharding import PartitionSpec
from notify_programs import routed_dispatch

import jax_ep

Case = cases.Case
QUANTIZE = {"quantize": "float8_e4m3fn"}
WAYS = [
    QUANTIZE | {"scale_format": scale_format, "dequantize": back}
    for scale_format in float8_check.FORMATS
    for back in (False, True)
]
# Whole groups of 128 channels and not, whole columns of 16 and not, all types, rows of 16 bytes.
LOW = (
    Case(name="groups", T=7, H=200, K=3, E=8, R=2, dtype="bfloat16"),
    Case(name="decode", T=128, H=7168, K=8, E=32, R=2, dtype="bfloat16"),
    Case(name="half", T=33, H=1288, K=8, E=60, R=2, dtype="float16"),
    Case(name="single", T=17, H=332, K=3, E=8, R=2),
    Case(name="eight", T=9, H=8, K=13, E=16, R=2, dtype="bfloat16"),
    Case(name="four", T=9, H=4, K=13, E=16, R=2),
    Case(name="very_wide", T=5, H=40_008, K=6, E=24, R=2, dtype="float16"),
    Case(name="one_rank", T=5, H=136, K=2, E=4, R=1, dtype="bfloat16"),
)
# And several epochs, rows between segments, dropped rows, slots. The widest rows are too long for
# bulk copies.
HIGH = (
    Case(name="prefill", T=200, H=7168, K=8, E=32, R=2, dtype="bfloat16"),
    Case(name="groups", T=9, H=200, K=3, E=8, R=2, dtype="bfloat16"),
    Case(name="aligned_chunks", T=41, H=136, K=3, E=8, R=2, chunk=16, alignment=4),
    Case(name="drops", T=52, H=1288, K=4, E=8, R=2, load=0.5, dtype="float16"),
    Case(name="slots", T=39, H=264, K=3, E=8, R=2, chunk=16, expand=False, routing="some_nobody"),
    Case(name="slots_drop", T=39, H=24, K=3, E=8, R=2, expand=False, load=0.5, dtype="bfloat16"),
    Case(name="eight", T=9, H=8, K=13, E=16, R=2, dtype="bfloat16"),
    Case(name="four", T=9, H=4, K=13, E=16, R=2),
    Case(name="very_wide", T=12, H=40_008, K=6, E=24, R=2, dtype="float16"),
    Case(name="too_wide", T=12, H=60_000, K=6, E=24, R=2, dtype="bfloat16"),
    Case(name="one_rank", T=33, H=136, K=2, E=4, R=1, dtype="bfloat16"),
)


def send_high(buffer, case, *arrays, **options):
    return programs.dispatch(buffer, case, *arrays, **options)


def send_routed(buffer, case, x, topk_idx, topk_weights, after=None, **options):
    routing = jax_ep.route(buffer, topk_idx)
    return routed_dispatch(buffer, case, x, routing, topk_weights, after=after, **options)


def send_low(layout, split):
    def send(buffer, case, *arrays, **options):
        if not split:
            return ll_check.dispatch(buffer, case, layout, *arrays, **options)
        pending = jax_ep.low_latency_dispatch_start(buffer, *arrays, layout=layout, **options)
        return jax_ep.low_latency_dispatch_done(buffer, pending)

    return send


def all_ways(buffer, case, send):
    """Jitted ``(x, topk_idx, topk_weights) ->`` a list, by way, of results by name.

    One way comes after the other: more than two starts may not be on their way at a time.
    """

    def program(*arrays):
        results, routed = [], None
        for way in WAYS:
            routed = send(buffer, case, *arrays, after=routed, **way)
            found = {"tokens": routed.tokens.reshape(-1, case.H)}
            if routed.scales is not None:
                found["scales"] = routed.scales.reshape(-1, routed.scales.shape[-1])
            found |= {"weights": routed.weights.reshape(-1), "recv_rows": routed.handle.recv_rows}
            results.append(found)
        return results

    return jax.jit(programs.sharded(buffer, program))


def rows_held(case, results) -> np.ndarray:
    """Which rows, of all ranks, hold a token."""
    recv_rows = case_check.by_rank(np.asarray(results["recv_rows"]), case)
    held = np.zeros((case.R, len(results["weights"]) // case.R), bool)
    for rank in range(case.R):
        held[rank, recv_rows[rank][recv_rows[rank] >= 0]] = True
    assert held.sum() == (recv_rows >= 0).sum() > 0
    return held.ravel()


def compare_with_cpus(case, mode, send, rng, specified=rows_held):
    """Hard rows and others, so that each buffer of the window gets rows of both kinds."""
    problems = [float8_check.hard_inputs(rng, case), cases.make_inputs(case, rng)]
    found = {}
    for platform in ("cuda", "cpu"):
        with gpu_world.make_buffer(case, platform, mode=mode) as buffer:
            run = all_ways(buffer, case, send)
            arrays = [gpu_world.put(buffer, i.x, i.topk_idx, i.topk_weights) for i in problems]
            found[platform] = [jax.device_get(run(*of)) for of in (*arrays, *arrays[::-1])]
            assert buffer.check() is None
    for call, (on_gpus, on_cpus) in enumerate(zip(found["cuda"], found["cpu"], strict=True)):
        for way, seen, expected in zip(WAYS, on_gpus, on_cpus, strict=True):
            where = f"call {call}, {way}"
            assert seen.keys() == expected.keys()
            np.testing.assert_array_equal(seen["recv_rows"], expected["recv_rows"], where)
            rows = specified(case, expected)
            for key in seen.keys() - {"recv_rows"}:
                float8_check.same_bits(seen[key][rows], expected[key][rows], f"{where}, {key}")


@pytest.mark.parametrize("split", [False, True], ids=["whole", "halves"])
@pytest.mark.parametrize("layout", ll_check.LAYOUTS)
@pytest.mark.parametrize("case", LOW, ids=lambda case: case.name)
def test_low_latency(case, layout, split, rng):
    compare_with_cpus(case, "low_latency", send_low(layout, split), rng)


def every_row(case, results):
    """Of a dispatch with ``zero_tail``, rows without a token are zeros."""
    assert (results["recv_rows"] >= 0).any()
    return slice(None)


@pytest.mark.parametrize("send", [send_high, send_routed], ids=["dispatch", "routed"])
@pytest.mark.parametrize("case", HIGH, ids=lambda case: case.name)
def test_high_throughput(case, send, rng):
    compare_with_cpus(case, "high_throughput", send, rng, every_row)


def check_gradients(case, mode, send, rng):
    """Those of rows that were never quantised, bit for bit."""
    inputs = cases.make_inputs(case, rng)
    with gpu_world.make_buffer(case, mode=mode) as buffer:

        def program(x, topk_idx, topk_weights, seed):
            results = []
            for way in ({}, *(way for way in WAYS if way["dequantize"])):

                def layer(x, topk_weights, way=way):
                    routed = send(buffer, case, x, topk_idx, topk_weights, **way)
                    return (routed.tokens, routed.weights), routed.handle.recv_rows

                (tokens, weights), pull, recv_rows = jax.vjp(layer, x, topk_weights, has_aux=True)
                key = jax.random.key(seed[0])
                d_tokens = jax.random.normal(key, tokens.shape, tokens.dtype)
                d_weights = jax.random.normal(key, weights.shape, weights.dtype)
                results.append((pull((d_tokens, d_weights)), recv_rows))
            return results

        run = jax.jit(programs.sharded(buffer, program))
        seeds = rng.integers(2**31, size=case.R).astype(np.uint32)
        arrays = (inputs.x, inputs.topk_idx, inputs.topk_weights, seeds)
        plain, *others = jax.device_get(run(*gpu_world.put(buffer, *arrays)))
        assert buffer.check() is None
    assert np.abs(plain[0][0].astype(np.float32)).max() > 0
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, other, plain)


@pytest.mark.parametrize("layout", ll_check.LAYOUTS)
def test_low_latency_gradients(layout, num_gpus, rng):
    case = gpu_world.on_ranks(LOW[0], num_gpus)
    check_gradients(case, "low_latency", send_low(layout, split=False), rng)


@pytest.mark.parametrize("expand", [True, False], ids=["rows", "slots"])
def test_high_throughput_gradients(expand, num_gpus, rng):
    case = dataclasses.replace(gpu_world.on_ranks(HIGH[1], num_gpus), expand=expand)
    check_gradients(case, "high_throughput", send_high, rng)


NUM_STEPS = 100


def check_replays(case, mode, send, combine, rng):
    """Rows as they are between quantised ones, in the same slots; most steps no handler sees."""
    steps = [cases.make_inputs(case, rng) for _ in range(NUM_STEPS)]
    stacked = [np.stack([getattr(s, name) for s in steps]) for name in ("x", "topk_idx")]
    stacked.append(np.stack([s.topk_weights for s in steps]))
    spec = PartitionSpec(None, "expert")
    outs = {}
    for platform in ("cuda", "cpu"):
        with gpu_world.make_buffer(case, platform, mode=mode) as buffer:

            def layer(way, x, topk_idx, topk_weights, buffer=buffer):
                routed = send(buffer, case, x, topk_idx, topk_weights, **way)
                rows = routed.tokens.astype(x.dtype)
                if routed.scales is not None:
                    rows = rows * float8_of_channels(routed.scales, case.H)
                return combine(buffer, gpu_world.leaky(rows), routed)

            def body(carry, arrays, layer=layer):
                x, topk_idx, topk_weights = arrays
                for way in (WAYS[0], {}, WAYS[3]):
                    x = layer(way, x, topk_idx, topk_weights)
                return carry, x

            def program(*stacks, body=body):
                return jax.lax.scan(body, None, stacks)[1]

            run = jax.jit(programs.sharded(buffer, program, in_specs=spec, out_specs=spec))
            outs[platform] = {"out": np.asarray(run(*stacked))}
            assert buffer.check() is None
            if platform == "cuda":
                assert buffer.stats()["captured_launches"] > 0, "XLA captured no graph"
    gpu_world.assert_same_bits(outs["cuda"], outs["cpu"])
    assert np.isfinite(outs["cuda"]["out"]).all()


def float8_of_channels(scales, hidden):
    return jnp.repeat(scales, float8_check.GROUP, axis=-1)[..., :hidden]


@pytest.mark.parametrize("layout", ll_check.LAYOUTS)
def test_low_latency_replays(layout, num_gpus, rng):
    case = gpu_world.on_ranks(Case(name="steps", T=33, H=264, K=3, E=8, R=2), num_gpus)
    send = send_low(layout, split=False)
    check_replays(case, "low_latency", send, jax_ep.low_latency_combine, rng)


def test_high_throughput_replays(num_gpus, rng):
    """Slots of packed rows lie otherwise in the window than those of rows as they are."""
    case = gpu_world.on_ranks(Case(name="steps", T=33, H=264, K=3, E=8, R=2, chunk=16), num_gpus)
    check_replays(case, "high_throughput", send_high, jax_ep.combine, rng)
