"""Several processes give the bits that one process gives."""

import contextlib

import case_check
import cases
import jax
import launch
import numpy as np
import pytest
import scenarios
from saved import bytes_of_shards, saved_by_rank

TABLE = {case.name: case for case in cases.CASES}
OF_TWO = [case.name for case in cases.CASES if case.R == 2]
OF_FOUR = ["four_ranks_bf16", "some_nobody", "chunked", "drops_aligned", "slots_chunked"]
OF_EIGHT = ["eight_ranks_f16", "chunked_even_bf16"]


def assert_specified_bits_agree(case, truth, key: str, got: list[bytes], expected: list[bytes]):
    """Rows that the options leave unwritten may hold anything."""
    written = {
        "tokens": case_check.written_tokens(case, truth),
        "d_y": case_check.written_rows(case, truth),
    }.get(key)
    assert len(got) == len(expected) == case.R
    for rank in range(case.R):
        parts = [np.frombuffer(part[rank], np.uint8) for part in (got, expected)]
        if written is not None and written[rank].size:
            parts = [part.reshape(written[rank].size, -1)[written[rank]] for part in parts]
        assert np.array_equal(*parts), f"{case.name}: {key} of rank {rank}"


@pytest.mark.parametrize(
    ("processes", "devices", "names"),
    [(2, 1, OF_TWO), (2, 2, OF_FOUR), (4, 1, OF_FOUR), (4, 2, OF_EIGHT)],
    ids=["2x1", "2x2", "4x1", "4x2"],
)
def test_bits_are_those_of_one_process(tmp_path, crews, processes, devices, names):
    seed = cases.fresh_seed()
    print(f"{cases.SEED_VARIABLE}={seed}")
    settings = {"cases": names, "seed": seed}
    crews(processes, devices).run(tmp_path, "case_table", settings)
    assert_bits_of_one_process(tmp_path, processes, names, seed)


def test_two_jobs_at_once_do_not_meet(tmp_path):
    """Same buffer ids, same shapes, other numbers."""
    names, jobs = ["two_ranks", "drops_chunked"], []
    with contextlib.ExitStack() as stack:
        for seed in range(2):
            settings = {"cases": names, "seed": seed}
            crew = stack.enter_context(launch.crew(tmp_path / f"{seed}", processes=2))
            jobs.append(crew.start(tmp_path / f"{seed}", "case_table", settings))
        for job in jobs:
            job.finish()
            job.crew.dismiss()
    for seed in range(2):
        assert_bits_of_one_process(tmp_path / f"{seed}", 2, names, seed)


def assert_bits_of_one_process(
    folder, num_processes: int, names: list[str], seed: int, platform: str | None = None
) -> None:
    """Runs the cases in this process and compares them with a job's, and with the oracle."""
    seen = saved_by_rank(folder, num_processes)
    for name in names:
        case = TABLE[name]
        problem = scenarios.problem_of(case, seed)
        results = scenarios.case_results(case, scenarios.expert_mesh(case.R, platform), seed)
        for key, array in results.items():
            got = list(seen[f"{name}/{key}"].values())
            assert_specified_bits_agree(case, problem.truth, key, got, bytes_of_shards(array))
        case_check.check_against_oracle(case, problem, jax.device_get(results))
