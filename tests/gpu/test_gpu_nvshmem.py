"""Two processes with a GPU each over NVSHMEM: the bits of one process, faults, many epochs.

On one host a GPU can write to its peer, so there are two ways to go: directly, and by puts, which
is how rows go to other nodes.
"""

import pathlib
import sys

import gpu_world
import jax
import numpy as np
import pytest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "processes"))
import float8_check
import launch
import low_latency_scenarios
import saved
import scenarios
import test_gpu_epochs
import test_gpu_float8
import test_gpu_processes
import test_modes_agree

import jax_ep

WAYS = {"puts": {"JAX_EP_FORCE_REMOTE": "1"}, "direct": {"JAX_EP_TRANSPORT": "nvshmem"}}


@pytest.fixture(scope="module", params=WAYS)
def crew(request, tmp_path_factory):
    """Two workers for all tests of a way, since NVSHMEM takes seconds to start."""
    gpu_world.require_nvshmem()
    folder = tmp_path_factory.mktemp(request.param)
    with launch.crew(folder, processes=2, gpus=2, variables=WAYS[request.param]) as crew:
        yield crew
        crew.dismiss()


def test_bits_are_those_of_one_process(tmp_path, crew, seed):
    test_gpu_processes.assert_case_table_has_the_bits_of_one_process(tmp_path, crew, seed)


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


def test_a_window_that_the_heap_has_no_room_for_is_refused_in_both_processes(tmp_path, crew):
    for result in crew.run(tmp_path, "refused"):
        assert result["type"] == "EpError"
        assert "NVSHMEM_SYMMETRIC_SIZE" in result["text"]


def test_low_latency_bits_are_those_of_one_process(tmp_path, crew, seed):
    """Of whole operations, of their gradients and of halves."""
    crew.run(tmp_path, "low_latency", {"seed": seed, "table": "gpus"})
    test_modes_agree.assert_low_latency_bits_of_one_process(tmp_path, 2, 2, seed, "cpu", "gpus")


def test_low_latency_float8_bits_are_those_of_one_process(tmp_path, crew, seed):
    crew.run(tmp_path, "low_latency_float8", {"seed": seed})
    seen, mesh = saved.saved_by_rank(tmp_path, 2), scenarios.expert_mesh(2, "cpu")
    for case, layout, split in low_latency_scenarios.FLOAT8:
        results = low_latency_scenarios.float8_results(case, layout, split, mesh, seed)
        for number, found in enumerate(jax.device_get(results)):
            held = test_gpu_float8.rows_held(case, found)
            for key, expected in found.items():
                parts = seen[f"{case.name}/{number} {key}"].values()
                got = np.frombuffer(b"".join(parts), expected.dtype).reshape(expected.shape)
                rows = slice(None) if key == "recv_rows" else held
                where = f"{case.name}, call {number}: {key}"
                float8_check.same_bits(got[rows], expected[rows], where)


def test_low_latency_micro_batches_interleaved(tmp_path, crew, seed):
    """Twenty rounds, of which XLA replays the last."""
    crew.run(tmp_path, "low_latency_micro_batches", {"seed": seed, "rounds": 20})
    seen, mesh = saved.saved_by_rank(tmp_path, 2), scenarios.expert_mesh(2, "cpu")
    results = low_latency_scenarios.micro_batch_results(mesh, seed, 20)
    for number, found in enumerate(results):
        for key, array in found.items():
            got = list(seen[f"{number} {key}"].values())
            assert got == saved.bytes_of_shards(array), f"round {number}, {key} batch"


def test_low_latency_epochs_of_changing_sizes(tmp_path, crew, seed, request):
    """Two operations a step, whole and in halves, on routings of which some send nothing."""
    settings = {
        "seed": seed,
        "tokens": [96, 1, 57],
        "steps": 50,
        "rounds": 2,
        "mode": "low_latency",
    }
    results = crew.run(tmp_path, "soak", settings)
    case = test_gpu_epochs.CASE
    layout = jax_ep.LowLatencyLayout.make(
        *(96, case.H, 2, case.E),
        num_experts_per_tok=case.K,
        dtype=case.dtype,
        staging=request.node.callspec.params["crew"] == "puts",
    )
    for result in results:
        assert result["module"] == "jax_ep._ffi_nvshmem"
        assert result["epochs"] == 2 * 50 * 3 * 2
        assert result["worst"] < gpu_world.TOLERANCE[case.dtype]
        assert result["window_bytes"] == layout.total_bytes


def test_low_latency_absent_rank_is_told_and_mended_by_a_reset(tmp_path, crew):
    """The sums after the reset are those before, so that no word of what was given up is left."""
    test_gpu_processes.assert_absent_rank_is_told_and_mended(tmp_path, crew, "low_latency")
