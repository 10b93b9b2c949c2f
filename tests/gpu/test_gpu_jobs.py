"""Jobs of two processes with a GPU each, from their start to their end: two at once, late ones,
training, one that is killed, either that goes first. Over CUDA IPC, and over NVSHMEM's puts.

The crews of a way start together and serve its tests in turn; the last tests end them.
"""

import contextlib
import pathlib
import sys

import gpu_world
import pytest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "processes"))
import cases
import launch
import scenarios
import test_cases_agree
import test_leaving
import test_training

WAYS = {"ipc": {}, "puts": {"JAX_EP_FORCE_REMOTE": "1"}}
MODULES = {"ipc": "jax_ep._ffi_cuda", "puts": "jax_ep._ffi_nvshmem"}


@pytest.fixture(scope="module", params=WAYS)
def way(request) -> str:
    if request.param == "puts":
        gpu_world.require_nvshmem()
    else:
        gpu_world.require_cuda(2)
    return request.param


@pytest.fixture(scope="module")
def crews(way, tmp_path_factory):
    """Three crews, of the last of which one process will be killed."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                launch.crew(
                    tmp_path_factory.mktemp(f"{way}-{name}"),
                    processes=2,
                    gpus=2,
                    late_s={1: 2.0},
                    variables=WAYS[way],
                )
            )
            for name in ("one", "other", "doomed")
        ]


def test_two_jobs_at_once_do_not_meet(tmp_path, crews):
    """Same GPUs, same buffer ids, same shapes, other numbers; both make their buffers again."""
    names, seeds = ["two_ranks", "drops_chunked"], [cases.fresh_seed() for _ in range(2)]
    print(f"seeds {seeds}")
    jobs = [
        crew.start(tmp_path / f"{seed}", "case_table", {"cases": names, "seed": seed})
        for crew, seed in zip(crews[:2], seeds, strict=True)
    ]
    for job in jobs:
        job.finish()
    for seed in seeds:
        test_cases_agree.assert_bits_of_one_process(tmp_path / f"{seed}", 2, names, seed, "cpu")


def test_late_processes_are_waited_for(tmp_path, way, crews):
    """They came 2 s late to JAX, too."""
    test_leaving.assert_late_processes_are_waited_for(tmp_path, crews[0])


def test_twenty_steps_have_the_bits_of_one_process_with_both_gpus(tmp_path, crews):
    """Nothing but our operations adds across ranks: gradients are gathered, and added in order."""
    seed = cases.fresh_seed()
    print(f"{cases.SEED_VARIABLE}={seed}")
    crews[0].run(tmp_path, "train_to_the_bit", {"seed": seed, "steps": 20})
    mesh = scenarios.expert_mesh(2, "cuda")
    test_training.assert_bits_of_one_process(tmp_path, mesh, seed, steps=20)


def test_a_process_killed_in_a_program_leaves_the_other_to_end_by_itself(tmp_path, way, crews):
    result = test_leaving.killed_in_a_program(tmp_path, crews[2], operations=2000)
    assert result["module"] == MODULES[way]


@pytest.mark.parametrize("first", [0, 1])
def test_whoever_closes_and_goes_first(tmp_path, way, crews, first):
    result = test_leaving.left_behind(tmp_path, crews[first], first)
    assert f"rank {first}" in result["left"]["text"]
    assert result["module"] == MODULES[way]
