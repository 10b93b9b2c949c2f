"""Two processes with a GPU each, or one for both: the bits of one process, and what they see of
faults."""

import pathlib
import sys

import gpu_world
import numpy as np
import pytest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "processes"))
import cases
import gpu_scenarios
import launch
import scenarios
import test_cases_agree as agreement


@pytest.fixture
def gpus() -> int:
    return min(2, len(gpu_world.gpus()))


def test_bits_are_those_of_one_process(tmp_path, gpus):
    names = [name for name in agreement.OF_TWO if agreement.TABLE[name].T > 0]
    seed = cases.fresh_seed()
    print(f"{cases.SEED_VARIABLE}={seed}")
    settings = {"cases": names, "seed": seed}
    launch.run(tmp_path, "case_table", processes=2, gpus=gpus, settings=settings)
    agreement.assert_bits_of_one_process(tmp_path, 2, names, seed, "cpu")


def test_low_latency_has_the_bits_of_one_process(tmp_path, gpus):
    seed = cases.fresh_seed()
    print(f"{cases.SEED_VARIABLE}={seed}")
    launch.run(tmp_path, "low_latency", processes=2, gpus=gpus, settings={"seed": seed})
    seen = agreement.saved_by_rank(tmp_path, 2)
    expected = gpu_scenarios.low_latency_results(scenarios.expert_mesh(2, "cpu"), seed)
    assert seen.keys() == expected.keys()
    for name, array in expected.items():
        parts = [np.asarray(shard.data).tobytes() for shard in array.addressable_shards]
        assert [part for _, part in sorted(seen[name].items())] == parts, name


def test_an_absent_rank_is_told_in_both_processes_and_mended_by_a_reset(tmp_path, gpus):
    first, last = launch.run(tmp_path, "absent_rank", processes=2, gpus=gpus)
    assert first["run"]["type"] == "EpTimeoutError"
    assert first["run"]["peer"] == 1
    assert first["run"]["seconds"] < 5
    for result in (first, last):
        assert "EpTimeoutError" in result["told"]["text"], "a poisoned buffer says so"
        assert result["healthy"]
    assert "rank 0" in last["told"]["text"]


def test_a_killed_process_leaves_the_other_at_work(tmp_path, gpus):
    with launch.job(tmp_path, "killed_beside_us", processes=2, gpus=gpus) as job:
        for process in range(2):
            job.wait_for_file(f"step-{process}")
        job.kill(1)
        (result,) = job.finish(killed=(1,), limit_s=60)
    assert "EpTimeoutError" in result["run"]["text"]
    assert result["run"]["seconds"] < 10
    assert result["alive"]
