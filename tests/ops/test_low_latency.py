"""Low-latency operations on the shapes of decode steps, against the oracle.

Padded and compact, fused and in halves, with both gradients.
"""

import case_check
import cases
import jax
import jax.numpy as jnp
import ll_check
import numpy as np
import programs
import pytest
from jax.sharding import PartitionSpec

import jax_ep

Case = cases.Case
# Too many rows for the reference's and the oracle's ways to be quick: native only.
LARGE = (
    Case(name="one_token", T=1, H=7168, K=8, E=288, R=8, dtype="bfloat16"),
    Case(name="seven_of_288", T=7, H=1024, K=8, E=288, R=8, dtype="bfloat16"),
    Case(name="seven_of_60", T=7, H=3584, K=22, E=60, R=4, dtype="bfloat16"),
    Case(name="hundred", T=128, H=1024, K=8, E=60, R=4, dtype="bfloat16"),
    Case(name="five_hundred", T=512, H=1024, K=1, E=8, R=2, dtype="float16"),
    Case(name="a_rank_with_nothing", T=7, H=1024, K=22, E=60, R=4, routing="empty_ranks"),
)
SMALL = (
    Case(name="one_token_one_expert", T=1, H=1024, K=1, E=8, R=8),
    Case(name="seven_k22", T=7, H=64, K=22, E=60, R=4, dtype="bfloat16", routing="empty_ranks"),
    Case(name="nobody", T=7, H=32, K=2, E=8, R=4, routing="nobody"),
    Case(name="skewed", T=21, H=32, K=4, E=32, R=8, routing="skewed"),
    Case(name="one_expert", T=15, H=16, K=3, E=8, R=4, routing="one_expert"),
    Case(name="out_of_range", T=14, H=16, K=4, E=8, R=2, routing="out_of_range"),
    Case(name="duplicates", T=14, H=16, K=6, E=8, R=4, routing="duplicates"),
    Case(name="three_ranks", T=11, H=24, K=3, E=9, R=3, dtype="float16"),
    Case(name="one_rank", T=9, H=32, K=2, E=4, R=1),
    Case(name="no_tokens", T=0, H=16, K=2, E=8, R=4),
)
CAPPED = (
    Case(name="drops", T=20, H=32, K=3, E=8, R=4, load=0.6),
    Case(name="capacity_one", T=5, H=16, K=2, E=4, R=2, load=0.01),
    Case(name="spare", T=8, H=16, K=2, E=8, R=8, load=12.0),
)
TABLE = [("native", case, layout) for case in LARGE for layout in ll_check.LAYOUTS]
for _backend in ("native", "reference"):
    TABLE += [(_backend, case, layout) for case in SMALL for layout in ll_check.LAYOUTS]
    TABLE += [(_backend, case, "compact") for case in CAPPED]


def table(test):
    ids = [f"{backend}-{case.name}-{layout}" for backend, case, layout in TABLE]
    cases_of_test = pytest.mark.parametrize(("backend", "case", "layout"), TABLE, ids=ids)
    return pytest.mark.table(cases_of_test(test))


@table
def test_fused_and_gradients(backend, case, layout, rng):
    problem = ll_check.make_problem(case, layout, rng)
    with ll_check.make_buffer(case, backend) as buffer:
        results = ll_check.everything(buffer, case, layout)(*problem.arguments())
        ll_check.check_against_oracle(case, problem, jax.device_get(results))
        check_faults(buffer, backend, problem)


@table
def test_halves(backend, case, layout, rng):
    problem = ll_check.make_problem(case, layout, rng)
    with ll_check.make_buffer(case, backend) as buffer:
        results = ll_check.in_halves(buffer, case, layout)(*problem.arguments())
        ll_check.check_against_oracle(case, problem, jax.device_get(results))
        check_faults(buffer, backend, problem)


def check_faults(buffer, backend, problem):
    """A fault is recorded once, also where two halves look at the entries."""
    if backend == "native" and problem.num_faults:
        with pytest.raises(jax_ep.EpDataError) as raised:
            buffer.check()
        assert raised.value.count == problem.num_faults
    assert buffer.check() is None


def test_three_operations_each_on_fresh_inputs(rng):
    """Later epochs meet slots that hold older rows: no result may show them."""
    case = Case(name="again", T=9, H=32, K=3, E=12, R=4)
    with ll_check.make_buffer(case, "native") as buffer:
        runs = [ll_check.everything(buffer, case, layout) for layout in ll_check.LAYOUTS]
        runs.append(ll_check.in_halves(buffer, case, "padded"))
        for _ in range(3):
            for layout, run in zip((*ll_check.LAYOUTS, "padded"), runs, strict=True):
                problem = ll_check.make_problem(case, layout, rng)
                results = jax.device_get(run(*problem.arguments()))
                ll_check.check_against_oracle(case, problem, results)


def test_bits_are_those_of_the_other_mode_and_of_the_halves(rng):
    """Compact, padded and split give the same sums, bit for bit, as dispatch and combine."""
    case = Case(name="bits", T=17, H=48, K=5, E=16, R=4, dtype="bfloat16")
    inputs = cases.make_inputs(case, rng)
    arguments = (inputs.x, inputs.topk_idx, inputs.topk_weights)

    def squared(tokens):
        return (tokens.astype(jnp.float32) ** 2).astype(tokens.dtype)

    with (
        programs.make_buffer(case, "native") as high,
        ll_check.make_buffer(case, "native") as low,
    ):

        def program(*arrays):
            routed = programs.dispatch(high, case, *arrays)
            outs = [jax_ep.combine(high, squared(routed.tokens), routed)]
            for layout in ll_check.LAYOUTS:
                fused = ll_check.dispatch(low, case, layout, *arrays, after=outs[-1])
                outs.append(jax_ep.low_latency_combine(low, squared(fused.tokens), fused))
                pending = jax_ep.low_latency_dispatch_start(
                    low, *arrays, layout=layout, after=outs[-1]
                )
                halves = jax_ep.low_latency_dispatch_done(low, pending)
                outs.append(ll_check.split_combine(low, squared(halves.tokens), halves))
            return jnp.stack(outs)

        split = PartitionSpec(None, "expert")
        outs = np.asarray(jax.jit(programs.sharded(high, program, out_specs=split))(*arguments))
    for out in outs[1:]:
        assert out.tobytes() == outs[0].tobytes()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("layout", ll_check.LAYOUTS)
def test_stats_add_up(backend, layout, split, rng):
    """Two operations' counts, and no time waited for oneself."""
    case = Case(name="stats", T=8, H=16, K=3, E=8, R=4)
    problems = [ll_check.make_problem(case, layout, rng) for _ in range(2)]
    with ll_check.make_buffer(case, backend) as buffer:
        send = ll_check.split_dispatch if split else ll_check.dispatch

        def program(stats, *arrays):
            return send(buffer, case, layout, *arrays, stats=stats).stats

        run = jax.jit(programs.sharded(buffer, program))
        start = np.full(case.E, 5, np.int32), np.full(case.R**2, 7, np.uint32)
        stats = jax_ep.LowLatencyStats(*start)
        for problem in problems:
            stats = run(stats, *problem.arguments()[:3])
        stats = jax.device_get(stats)
    received = sum(problem.truth.group_sizes for problem in problems)
    np.testing.assert_array_equal(stats.tokens_per_expert, 5 + received.reshape(-1))
    waited = case_check.by_rank(stats.waited_ns, case).astype(np.int64) - 7
    assert (np.diagonal(waited) == 0).all()
    assert (waited >= 0).all()
    if backend == "native":
        assert waited.sum() < 20e9


def test_waits_are_charged_to_the_late_rank(rng):
    case = Case(name="late", T=4, H=16, K=2, E=8, R=4)
    inputs = cases.make_inputs(case, rng)
    late = int(rng.integers(case.R))
    with ll_check.make_buffer(case, "native") as buffer:

        def program(*arrays):
            zero = jax_ep.LowLatencyStats.zeros(buffer.experts_per_rank, buffer.num_ranks)
            return ll_check.dispatch(buffer, case, "padded", *arrays, stats=zero).stats.waited_ns

        run = jax.jit(programs.sharded(buffer, program))
        arguments = (inputs.x, inputs.topk_idx, inputs.topk_weights)
        jax.block_until_ready(run(*arguments))
        buffer._native.set_fault(buffer.id, "late", late, microseconds=200_000)
        waited = case_check.by_rank(run(*arguments), case)
    for rank in set(range(case.R)) - {late}:
        assert waited[rank, late] > 100e6
        others = set(range(case.R)) - {late}
        assert all(waited[rank, other] < 100e6 for other in others)
