"""Two processes with a GPU each, or one for both: the bits of one process, and what they see of
faults."""

import pathlib
import sys

import gpu_world
import pytest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "processes"))
import cases
import launch
import test_cases_agree
import test_modes_agree


@pytest.fixture
def crew(tmp_path):
    """Two workers, as many GPUs as there are for them."""
    with launch.crew(tmp_path / "crew", processes=2, gpus=min(2, len(gpu_world.gpus()))) as crew:
        yield crew


def test_bits_are_those_of_one_process(tmp_path, crew):
    table = test_cases_agree.TABLE
    names = [name for name in test_cases_agree.OF_TWO if table[name].T > 0]
    seed = cases.fresh_seed()
    print(f"{cases.SEED_VARIABLE}={seed}")
    crew.run(tmp_path, "case_table", {"cases": names, "seed": seed})
    test_cases_agree.assert_bits_of_one_process(tmp_path, 2, names, seed, "cpu")
    crew.dismiss()


def test_low_latency_has_the_bits_of_one_process(tmp_path, crew):
    seed = cases.fresh_seed()
    print(f"{cases.SEED_VARIABLE}={seed}")
    crew.run(tmp_path, "low_latency", {"seed": seed})
    test_modes_agree.assert_low_latency_bits_of_one_process(tmp_path, 2, 2, seed, "cpu")
    crew.dismiss()


def assert_absent_rank_is_told_and_mended(tmp_path, crew, mode="high_throughput"):
    first, last = crew.run(tmp_path, "absent_rank", {"mode": mode})
    assert first["run"]["type"] == "EpTimeoutError"
    assert first["run"]["peer"] == 1
    assert first["run"]["seconds"] < 5
    for result in (first, last):
        assert "EpTimeoutError" in result["told"]["text"], "a poisoned buffer says so"
        assert result["healthy"]
    assert "rank 0" in last["told"]["text"]


def test_an_absent_rank_is_told_in_both_processes_and_mended_by_a_reset(tmp_path, crew):
    assert_absent_rank_is_told_and_mended(tmp_path, crew)
    crew.dismiss()


def test_a_killed_process_leaves_the_other_at_work(tmp_path, crew):
    job = crew.start(tmp_path, "killed_beside_us")
    for process in range(2):
        job.wait_for_file(f"step-{process}")
    job.kill(1)
    (result,) = job.finish(killed=(1,), limit_s=60)
    assert "EpTimeoutError" in result["run"]["text"]
    assert result["run"]["seconds"] < 10
    assert result["alive"]
