"""Every case of the table, forward and backward, on every backend, against the oracle."""

import dataclasses

import case_check
import cases
import jax
import numpy as np
import programs
import pytest

BACKENDS = ("reference", "native", "window")


@pytest.mark.table
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_case_against_oracle(case, backend, rng):
    problem = case_check.make_problem(case, rng)
    with programs.make_buffer(case, backend) as buffer:
        results = case_check.everything(buffer, case)(*problem.arguments())
        case_check.check_against_oracle(case, problem, results)
        if problem.num_faults == 0:
            assert buffer.check() is None


@pytest.mark.table
@pytest.mark.parametrize("dtype", sorted(case_check.TOLERANCE))
@pytest.mark.parametrize("name", ["chunked", "drops_aligned", "many_k", "four_ranks_bf16"])
def test_who_moves_the_rows_shows_in_no_bit(name, dtype, rng):
    """Partial sums made by the receiver are those that the window would have carried."""
    case = dataclasses.replace(cases.BY_NAME[name], dtype=dtype)
    arguments = case_check.make_problem(case, rng).arguments()
    results = []
    for backend in ("native", "window"):
        with programs.make_buffer(case, backend) as buffer:
            results.append(case_check.everything(buffer, case)(*arguments))
    for in_place, carried in zip(*map(jax.tree.leaves, results), strict=True):
        assert np.asarray(in_place).tobytes() == np.asarray(carried).tobytes()


def test_table_covers_what_it_promises():
    """The shapes that peers get wrong are in the table; a case removed by mistake shows here."""
    table = cases.CASES
    assert {case.R for case in table} == {1, 2, 3, 4, 8}
    assert {case.dtype for case in table} == set(case_check.TOLERANCE)
    assert {case.routing for case in table} == set(cases.ROUTINGS)
    assert any(case.K == 22 for case in table)
    assert any(case.experts_per_rank > 128 for case in table)
    assert any(case.T == 0 for case in table)
    assert any(case.chunk and case.chunk < case.T and case.T % case.chunk for case in table)
    assert len(cases.BY_NAME) == len(table) + len(cases.BENCHMARK_CASES)
