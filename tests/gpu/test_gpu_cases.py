"""The case table on GPUs: against the oracle, and bit for bit against the CPU backend."""

import case_check
import cases
import gpu_world
import jax
import numpy as np
import pytest

# On one rank nothing is sent: what stays is routing, capacity, alignment and faults.
ON_ONE_RANK = ("one_rank", "out_of_range", "duplicates", "drops_aligned", "chunked", "no_tokens")
TABLE = [(case, 2) for case in cases.CASES if case.R > 1 and (case.T > 0 or gpu_world.EMPTY_ARRAYS)]
TABLE += [(cases.BY_NAME[name], 1) for name in ON_ONE_RANK]


def specified(case, problem, results) -> dict[str, np.ndarray]:
    """Results without the rows that a loose tail leaves unspecified."""
    written = {
        "tokens": case_check.written_tokens(case, problem.truth),
        "d_y": case_check.written_rows(case, problem.truth),
    }
    return {
        name: case_check.by_rank(array, case)[written[name]]
        if name in written
        else np.asarray(array)
        for name, array in results.items()
    }


@pytest.mark.parametrize(
    ("case", "num_ranks"), TABLE, ids=[f"{case.name}-{ranks}" for case, ranks in TABLE]
)
def test_case(case, num_ranks, rng):
    case = gpu_world.on_ranks(case, num_ranks)
    problem = case_check.make_problem(case, rng)
    results = {}
    for platform in ("cuda", "cpu"):
        with gpu_world.make_buffer(case, platform) as buffer:
            arguments = gpu_world.put(buffer, *problem.arguments())
            results[platform] = case_check.everything(buffer, case)(*arguments)
            case_check.check_against_oracle(case, problem, results[platform])
            if problem.num_faults == 0:
                assert buffer.check() is None
    gpu_world.assert_same_bits(
        specified(case, problem, results["cuda"]), specified(case, problem, results["cpu"])
    )


# Rows of 14 KB in bulk copies, rows in several parts, more tokens than an epoch carries.
LARGE = (
    cases.Case(name="prefill", T=512, H=7168, K=8, E=64, R=2, dtype="bfloat16", load=1.5),
    cases.Case(name="wide_float32", T=96, H=7168, K=8, E=64, R=2, load=1.5),
    cases.Case(name="very_wide", T=40, H=40_008, K=6, E=24, R=2, dtype="float16", load=1.5),
    cases.Case(name="many_chunks", T=1000, H=512, K=6, E=32, R=2, dtype="bfloat16", chunk=64),
)


@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_large_case_has_the_bits_of_the_cpu(case, rng):
    results = {}
    inputs = cases.make_inputs(case, rng)
    rows = (case.R * case.rows, case.H)
    d_tokens, y = (cases.random_rows(rng, rows, case.dtype) for _ in range(2))
    d_weights, row_weights = (rng.normal(size=rows[:1]).astype(np.float32) for _ in range(2))
    g = cases.random_rows(rng, (case.R * case.T, case.H), case.dtype)
    problem = [inputs.x, inputs.topk_idx, inputs.topk_weights]
    problem += [d_tokens, d_weights, y, row_weights, g]
    for platform in ("cuda", "cpu"):
        with gpu_world.make_buffer(case, platform) as buffer:
            run = case_check.everything(buffer, case)
            results[platform] = jax.block_until_ready(run(*gpu_world.put(buffer, *problem)))
            assert buffer.check() is None
    gpu_world.assert_same_bits(results["cuda"], results["cpu"])
    assert np.abs(np.asarray(results["cuda"]["out"]).astype(np.float32)).max() > 0.1
