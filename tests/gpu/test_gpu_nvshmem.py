"""Two processes with a GPU each over NVSHMEM: the bits of one process, faults, many epochs.

On one host a GPU can write to its peer, so there are two ways to go: directly, and by puts, which
is how rows go to other nodes.
"""

import pathlib
import sys

import gpu_world
import pytest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "processes"))
import cases
import launch
import scenarios
import test_cases_agree
import test_gpu_processes
import test_modes_agree

WAYS = {"puts": {"JAX_EP_FORCE_REMOTE": "1"}, "direct": {"JAX_EP_TRANSPORT": "nvshmem"}}


@pytest.fixture(scope="module", params=WAYS)
def crew(request, tmp_path_factory):
    """Two workers for all tests of a way, since NVSHMEM takes seconds to start."""
    gpu_world.require_nvshmem()
    folder = tmp_path_factory.mktemp(request.param)
    with launch.crew(folder, processes=2, gpus=2, variables=WAYS[request.param]) as crew:
        yield crew
        crew.dismiss()


@pytest.fixture
def seed() -> int:
    fresh = cases.fresh_seed()
    print(f"{cases.SEED_VARIABLE}={fresh}")
    return fresh


def test_bits_are_those_of_one_process(tmp_path, crew, seed):
    """Of every result of the case table, gradients included."""
    table = test_cases_agree.TABLE
    names = [name for name in test_cases_agree.OF_TWO if table[name].T > 0]
    crew.run(tmp_path, "case_table", {"cases": names, "seed": seed})
    test_cases_agree.assert_bits_of_one_process(tmp_path, 2, names, seed, "cpu")


def test_notices_and_dispatches_along_routings(tmp_path, crew, seed):
    settings = {"seed": seed, "two_axes": False, "backend": "native"}
    told = crew.run(tmp_path, "notices", settings)
    mesh = scenarios.expert_mesh(2, "cpu")
    test_modes_agree.assert_notices_of_one_process(tmp_path, told, mesh, "native", seed)


def test_a_thousand_epochs_of_changing_sizes(tmp_path, crew, seed):
    """Chunks of 20 tokens: 5, 1, 1 and 3 epochs an operation, 250 a round."""
    settings = {"seed": seed, "tokens": [96, 1, 20, 57], "steps": 25, "rounds": 5}
    for result in crew.run(tmp_path, "soak", settings):
        assert result["module"] == "jax_ep._ffi_nvshmem"
        assert result["epochs"] >= 1000
        assert result["worst"] < gpu_world.TOLERANCE["bfloat16"]


def test_an_absent_rank_is_told_in_both_processes_and_mended_by_a_reset(tmp_path, crew):
    test_gpu_processes.assert_absent_rank_is_told_and_mended(tmp_path, crew)


def test_windows_of_closed_buffers_are_used_again(tmp_path, crew):
    """By buffers of the same size; after a closed one of 16 tokens another takes its window."""
    for result in crew.run(tmp_path, "buffers_in_turn"):
        before = result["given_back"][0]
        assert result["given_back"] == [before, before, before + 1, before + 1, before + 2]
        assert result["sound"] == [None] * len(result["sound"])


def test_low_latency_is_refused_in_both_processes(tmp_path, crew):
    for result in crew.run(tmp_path, "refused", {"for": "mode"}):
        assert result["type"] == "EpUsageError"
        assert "mode='low_latency' is not offered" in result["text"]


def test_a_window_that_the_heap_has_no_room_for_is_refused_in_both_processes(tmp_path, crew):
    for result in crew.run(tmp_path, "refused", {"for": "size"}):
        assert result["type"] == "EpError"
        assert "NVSHMEM_SYMMETRIC_SIZE" in result["text"]
