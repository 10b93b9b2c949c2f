"""Rows quantised for the way: values and scales, rows that come back, and how far off they are."""

import case_check
import cases
import float8_check
import jax
import jax.numpy as jnp
import ll_check
import numpy as np
import oracle
import programs
import pytest

import jax_ep
from jax_ep import _float8

Case = cases.Case
NATIVE = ("native", "window")
DTYPES = ("float32", "bfloat16", "float16")
# Groups of 128 and 72 channels; several epochs; rows between segments; dropped rows.
HIGH = (
    Case(name="groups", T=9, H=200, K=3, E=8, R=4, dtype="bfloat16"),
    Case(name="aligned_chunks", T=11, H=136, K=3, E=9, R=3, chunk=4, alignment=4),
    Case(name="drops", T=12, H=16, K=4, E=8, R=2, load=0.5, dtype="float16"),
    Case(name="slots", T=9, H=264, K=3, E=8, R=4, chunk=4, expand=False, routing="some_nobody"),
    Case(name="slots_drop", T=9, H=24, K=3, E=8, R=2, expand=False, load=0.5, dtype="bfloat16"),
    # Rows of 16 bytes take 20 as values and scale; 13 entries fill the slot's 128 bytes.
    Case(name="slot_full", T=9, H=8, K=13, E=16, R=2, dtype="bfloat16"),
    Case(name="slot_full_f32", T=9, H=4, K=13, E=16, R=2),
    Case(name="one_rank", T=9, H=128, K=2, E=4, R=1, dtype="float16"),
    Case(name="no_tokens", T=0, H=144, K=2, E=8, R=2),
)
LOW = (
    Case(name="groups", T=7, H=200, K=3, E=8, R=4, dtype="bfloat16"),
    Case(name="wide", T=1, H=7168, K=8, E=32, R=4, dtype="bfloat16"),
    Case(name="slot_full", T=9, H=8, K=13, E=16, R=2, dtype="float16"),
    Case(name="one_rank", T=5, H=128, K=2, E=4, R=1),
)


def on_backends(table, reference):
    """Every case natively; those named on the reference too, which takes seconds to compile."""
    pairs = [(case, backend) for case in table for backend in NATIVE]
    pairs += [(case, "reference") for case in table if case.name in reference]
    ids = [f"{case.name}-{backend}" for case, backend in pairs]
    return pytest.mark.parametrize(("case", "backend"), pairs, ids=ids)


def tokens_expected(rows, scale_format, dequantize, dtype):
    """Arrays that a dispatch gives for float rows: tokens, and scales where there are any."""
    if dequantize:
        return (float8_check.dequantized(rows, scale_format, jnp.dtype(dtype)),)
    return float8_check.quantized(rows, scale_format)


def tokens_seen(routed):
    return (routed.tokens,) if routed.scales is None else (routed.tokens, routed.scales)


def by_rank(arrays, case):
    return [case_check.by_rank(np.asarray(array), case) for array in arrays]


@pytest.fixture(params=float8_check.FORMATS)
def scale_format(request):
    return request.param


@pytest.fixture(params=[False, True], ids=["pair", "rows"])
def dequantize(request):
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
def test_formula_in_jax(scale_format, dtype, rng):
    """Also rows of one short group."""

    @jax.jit
    def run(rows):
        pair = _float8.quantize(rows, scale_format)
        return *pair, _float8.dequantize(*pair, rows.dtype)

    for hidden in (5, 128, 333):
        rows = float8_check.hard_rows(rng, hidden, dtype)
        known = [*float8_check.quantized(rows, scale_format)]
        known.append(float8_check.dequantized(rows, scale_format, rows.dtype))
        for seen, expected in zip(run(rows), known, strict=True):
            float8_check.same_bits(seen, expected, (hidden, dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantising_again_gives_the_same_rows(dtype, rng):
    """With power-of-two scales, of rows that came back: sharp-bits.md promises it."""
    rows = float8_check.hard_rows(rng, 333, dtype)

    @jax.jit
    def there_and_back(rows):
        return _float8.dequantize(*_float8.quantize(rows, "power_of_two"), rows.dtype)

    once = np.asarray(there_and_back(rows))
    assert (once != rows).any()
    finite = np.isfinite(once.astype(np.float32)).all(1)
    assert finite.sum() > 5
    float8_check.same_bits(np.asarray(there_and_back(once))[finite], once[finite], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("payload", NATIVE)
def test_formula_natively(payload, dtype, rng):
    """Hard rows to both ranks, all four ways in one program."""
    case = Case(name="hard", T=16, H=1288, K=2, E=4, R=2, dtype=dtype)
    inputs = float8_check.hard_inputs(rng, case)
    ways = [(f, d) for f in float8_check.FORMATS for d in (False, True)]
    with programs.make_buffer(case, payload) as buffer:

        def program(*arrays):
            for scale_format, back in ways:
                routed = jax_ep.dispatch(
                    *(buffer, *arrays),
                    quantize="float8_e4m3fn",
                    scale_format=scale_format,
                    dequantize=back,
                )
                yield (*tokens_seen(routed), routed.handle.recv_rows)

        run = jax.jit(programs.sharded(buffer, lambda *arrays: list(program(*arrays))))
        results = run(inputs.x, inputs.topk_idx, inputs.topk_weights)
    for (scale_format, back), (*seen, recv_rows) in zip(ways, results, strict=True):
        expected = by_rank(tokens_expected(inputs.x, scale_format, back, dtype), case)
        recv_rows = case_check.by_rank(recv_rows, case)
        assert (recv_rows >= 0).sum() == 2 * case.T * case.K
        for rank, slot, k in np.argwhere(recv_rows >= 0):
            source, token = divmod(slot, case.T)
            for array, known in zip(by_rank(seen, case), expected, strict=True):
                row = array[rank, recv_rows[rank, slot, k]]
                float8_check.same_bits(row, known[source, token], (scale_format, back, token))


@pytest.mark.table
@on_backends(HIGH, reference=("aligned_chunks", "slots_drop", "no_tokens"))
def test_dispatch(backend, case, rng):
    """Every specified row, those without a token too, and all else as without quantising."""
    problem = case_check.make_problem(case, rng)
    truth = problem.truth
    rows = truth.tokens
    if not case.expand:
        rows, _ = oracle.slots(truth, case_check.by_rank(problem.inputs.x, case))
    ways = [("float32", False), ("power_of_two", False), ("float32", True), ("power_of_two", True)]
    with programs.make_buffer(case, backend) as buffer:

        def program(ballast, *arrays):
            plain = programs.dispatch(buffer, case, *arrays)
            routed = [
                jax_ep.dispatch(
                    *(buffer, *arrays),
                    capacity=case.capacity,
                    expert_alignment=case.alignment,
                    expand=case.expand,
                    quantize="float8_e4m3fn",
                    scale_format=scale_format,
                    dequantize=back,
                )
                for scale_format, back in ways
            ]
            others = [(r.weights, r.group_sizes, r.handle.recv_rows) for r in (plain, *routed)]
            return ballast, [tokens_seen(r) for r in routed], others

        run = jax.jit(programs.sharded(buffer, program))
        _, tokens, (plain, *others) = run(np.zeros(case.R), *problem.arguments()[:3])
    for (scale_format, back), seen, other in zip(ways, tokens, others, strict=True):
        expected = tokens_expected(rows, scale_format, back, case.dtype)
        for array, known in zip(by_rank(seen, case), expected, strict=True):
            float8_check.same_bits(array, known, (scale_format, back))
        for mine, theirs in zip(other, plain, strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.table
@pytest.mark.parametrize("split", [False, True], ids=["fused", "halves"])
@pytest.mark.parametrize("layout", ll_check.LAYOUTS)
@on_backends(LOW, reference=("groups",))
def test_low_latency(case, backend, layout, split, rng):
    problem = ll_check.make_problem(case, layout, rng)
    held = problem.truth.holds_token
    ways = [("float32", False), ("power_of_two", True)]
    with ll_check.make_buffer(case, backend) as buffer:

        def send(*arrays, **options):
            if not split:
                return jax_ep.low_latency_dispatch(buffer, *arrays, layout=layout, **options)
            pending = jax_ep.low_latency_dispatch_start(buffer, *arrays, layout=layout, **options)
            return jax_ep.low_latency_dispatch_done(buffer, pending)

        def program(*arrays):
            results = []
            for scale_format, back in ways:
                options = {"scale_format": scale_format, "dequantize": back}
                routed = send(*arrays, quantize="float8_e4m3fn", **options)
                assert routed.tokens.shape[:-1] == routed.weights.shape
                rows = [a.reshape(-1, a.shape[-1]) for a in tokens_seen(routed)]
                results.append((rows, routed.counts, routed.handle.recv_rows))
            return results

        results = jax.jit(programs.sharded(buffer, program))(*problem.arguments()[:3])
    for (scale_format, back), (rows, counts, recv_rows) in zip(ways, results, strict=True):
        np.testing.assert_array_equal(case_check.by_rank(counts, case), problem.truth.group_sizes)
        np.testing.assert_array_equal(case_check.by_rank(recv_rows, case), problem.truth.recv_rows)
        expected = tokens_expected(problem.truth.tokens, scale_format, back, case.dtype)
        for array, known in zip(by_rank(rows, case), expected, strict=True):
            float8_check.same_bits(array[held], known[held], (scale_format, back))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_come_back_are_near(scale_format, dtype, rng):
    """Within the documented bound, at sizes of 1e-4 to 1e4; and the scales are what they say."""
    case = Case(name="near", T=8, H=7168, K=1, E=2, R=2, dtype=dtype)
    inputs = cases.make_inputs(case, rng)
    spread = 10.0 ** rng.uniform(-4, 4, (inputs.x.shape[0], 1))
    x = (inputs.x.astype(np.float64) * spread).astype(inputs.x.dtype)
    inputs.topk_idx[:] = np.arange(2).repeat(case.T)[:, None]  # every token to its own rank
    options = {"quantize": "float8_e4m3fn", "scale_format": scale_format}
    with programs.make_buffer(case, "native") as buffer:

        def program(*arrays):
            rows = jax_ep.dispatch(buffer, *arrays, dequantize=True, capacity=case.T, **options)
            pair = jax_ep.dispatch(buffer, *arrays, capacity=case.T, **options)
            return rows.tokens, pair.scales

        back, scales = jax.device_get(
            jax.jit(programs.sharded(buffer, program))(x, inputs.topk_idx, inputs.topk_weights)
        )
    error = np.abs(back.astype(np.float64) - x.astype(np.float64))
    allowed = float8_check.bound(x, scale_format, dtype)
    assert (error <= allowed).all(), (error / allowed).max()
    assert (error > allowed / 4).any(), "the bound says nothing"
    amax = np.abs(x.astype(np.float64)).reshape(len(x), -1, 128).max(-1)
    if scale_format == "float32":
        np.testing.assert_allclose(scales, amax / 448, rtol=2e-7)
    else:
        assert (np.frexp(scales)[0] == 0.5).all()
        assert (scales * (1 + 2e-7) >= amax / 448).all()
        assert (scales < 2 * amax / 448).all()


def test_every_element_is_written(rng):
    """Values and scales into memory full of NaN."""
    case = Case(name="poisoned", T=9, H=144, K=3, E=8, R=4, alignment=4, load=1.5)
    inputs = cases.make_inputs(case, rng)
    values = np.full((case.R * case.rows, case.H), np.nan, float8_check.FLOAT8)
    scales = np.full((case.R * case.rows, 2), np.nan, np.float32)
    with programs.make_buffer(case, "native") as buffer:

        def program(_values, _scales, *arrays):
            return tokens_seen(
                jax_ep.dispatch(
                    *(buffer, *arrays),
                    capacity=case.capacity,
                    expert_alignment=case.alignment,
                    quantize="float8_e4m3fn",
                )
            )

        sharding = jax.sharding.NamedSharding(buffer.mesh, jax.sharding.PartitionSpec("expert"))
        poison = [jax.device_put(array, sharding) for array in (values, scales)]
        run = jax.jit(programs.sharded(buffer, program), donate_argnums=(0, 1), keep_unused=True)
        arguments = (*poison, inputs.x, inputs.topk_idx, inputs.topk_weights)
        assert run.lower(*arguments).compile().as_text().count("may-alias") == 2
        seen = run(*arguments)
    expected = float8_check.quantized(case_check.truth_of(case, inputs).tokens, "float32")
    for array, known in zip(by_rank(seen, case), expected, strict=True):
        float8_check.same_bits(array, known, "poisoned")
