"""Every case of the table, forward and backward, on both backends, against the oracle."""

import case_check
import cases
import programs
import pytest


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_case_against_oracle(case, backend, rng):
    problem = case_check.make_problem(case, rng)
    with programs.make_buffer(case, backend) as buffer:
        results = case_check.everything(buffer, case)(*problem.arguments())
        case_check.check_against_oracle(case, problem, results)
        if problem.num_faults == 0:
            assert buffer.check() is None


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
