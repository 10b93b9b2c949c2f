"""Two processes with a GPU each, one for both, or two for both: the bits of one process, and what
they see of faults."""

import pathlib
import sys

import gpu_world
import pytest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "processes"))
import launch
import test_cases_agree
import test_modes_agree


@pytest.fixture(scope="module")
def crew(tmp_path_factory):
    """Two workers, as many GPUs as there are for them."""
    gpu_world.require_cuda(1)
    folder, gpus = tmp_path_factory.mktemp("crew"), min(2, len(gpu_world.gpus()))
    with launch.crew(folder, processes=2, gpus=gpus) as crew:
        yield crew
        crew.dismiss()


@pytest.fixture(scope="module")
def mixed_crew(tmp_path_factory):
    """Two workers that have both GPUs each: four ranks.

    Kernels of two processes take turns on a GPU, each with all of it, so that those that wait for
    each other need not find room together. NCCL refuses such ranks: only our operations may run.
    """
    gpu_world.require_cuda(2)
    with launch.crew(tmp_path_factory.mktemp("mixed"), processes=2, gpus=2, gpus_each=2) as crew:
        yield crew
        crew.dismiss()


def test_bits_are_those_of_one_process(tmp_path, crew, seed):
    assert_case_table_has_the_bits_of_one_process(tmp_path, crew, seed)


def assert_case_table_has_the_bits_of_one_process(folder, crew, seed) -> None:
    """Of every result of the case table, gradients included."""
    table = test_cases_agree.TABLE
    names = [name for name in test_cases_agree.OF_TWO if table[name].T > 0]
    crew.run(folder, "case_table", {"cases": names, "seed": seed})
    test_cases_agree.assert_bits_of_one_process(folder, 2, names, seed, "cpu")


def test_low_latency_has_the_bits_of_one_process(tmp_path, crew, seed):
    crew.run(tmp_path, "low_latency", {"seed": seed})
    test_modes_agree.assert_low_latency_bits_of_one_process(tmp_path, 2, 2, seed, "cpu")


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


def test_processes_with_several_gpus_each_have_the_bits_of_one(tmp_path, mixed_crew, seed):
    names = test_cases_agree.OF_FOUR
    mixed_crew.run(tmp_path, "case_table", {"cases": names, "seed": seed})
    test_cases_agree.assert_bits_of_one_process(tmp_path, 2, names, seed, "cpu")


def test_low_latency_in_processes_with_several_gpus_each(tmp_path, mixed_crew, seed):
    mixed_crew.run(tmp_path, "low_latency", {"seed": seed})
    test_modes_agree.assert_low_latency_bits_of_one_process(tmp_path, 2, 4, seed, "cpu")
