"""Low latency and routings give several processes what they give one."""

import cases
import jax
import ll_check
import mode_scenarios
import notify_programs
import numpy as np
import pytest
import scenarios
from jax.sharding import Mesh
from saved import bytes_of_shards, saved_by_rank


@pytest.mark.parametrize(("processes", "devices"), [(2, 1), (2, 2)], ids=["2x1", "2x2"])
def test_low_latency_bits_are_those_of_one_process(tmp_path, crews, processes, devices):
    seed, num_ranks = cases.fresh_seed(), processes * devices
    print(f"{cases.SEED_VARIABLE}={seed}")
    crews(processes, devices).run(tmp_path, "low_latency", {"seed": seed})
    assert_low_latency_bits_of_one_process(tmp_path, processes, num_ranks, seed)


def assert_low_latency_bits_of_one_process(
    folder,
    processes: int,
    num_ranks: int,
    seed: int,
    platform: str | None = None,
    table: int | str | None = None,
) -> None:
    """Runs the cases in this process and compares them with a job's, and with the oracle."""
    seen = saved_by_rank(folder, processes)
    for case, layout in mode_scenarios.LOW_LATENCY[table or num_ranks]:
        problem = mode_scenarios.low_latency_problem(case, layout, seed)
        mesh = scenarios.expert_mesh(num_ranks, platform)
        results = mode_scenarios.low_latency_results(case, layout, mesh, seed)
        for key, array in results.items():
            got = list(seen[f"{case.name}/{key}"].values())
            held = problem.truth.holds_token if key.endswith("tokens") else None
            assert_bits_agree(f"{case.name}, {layout}: {key}", got, bytes_of_shards(array), held)
        whole = {key: array for key, array in results.items() if "halves" not in key}
        halves = {key.removeprefix("halves "): results[key] for key in results.keys() - whole}
        for found in (whole, halves):
            ll_check.check_against_oracle(case, problem, jax.device_get(found))


def assert_bits_agree(what: str, got: list[bytes], expected: list[bytes], held) -> None:
    """held: by rank, rows that are specified; None: all are."""
    assert len(got) == len(expected), what
    for rank in range(len(got)):
        parts = [np.frombuffer(part[rank], np.uint8) for part in (got, expected)]
        if held is not None:
            parts = [part.reshape(held.shape[1], -1)[held[rank]] for part in parts]
        assert np.array_equal(*parts), f"{what} of rank {rank}"


@pytest.mark.parametrize(
    ("backend", "two_axes"), [("native", False), ("native", True), ("reference", True)]
)
def test_notices_tell_every_process_what_they_tell_one(tmp_path, crews, backend, two_axes):
    """Where a group lies in one process, the others hear of its counts from that one."""
    seed = cases.fresh_seed()
    print(f"{cases.SEED_VARIABLE}={seed}")
    settings = {"seed": seed, "two_axes": two_axes, "backend": backend}
    told = crews(2, 2).run(tmp_path, "notices", settings)
    mesh = scenarios.two_axis_mesh() if two_axes else scenarios.expert_mesh(4)
    assert_notices_of_one_process(tmp_path, told, mesh, backend, seed)


def assert_notices_of_one_process(
    folder, told: list[dict], mesh: Mesh, backend: str, seed: int
) -> None:
    """Gives the notices in this process and compares them with a job's, and with the truth."""
    told_alone, arrays = mode_scenarios.notice_results(mesh, backend, seed)
    assert told == [told_alone, told_alone]
    seen = saved_by_rank(folder, 2)
    for key, array in arrays.items():
        assert list(seen[key].values()) == bytes_of_shards(array), key

    case = mode_scenarios.noticed_case(mesh)
    for number, inputs in enumerate(mode_scenarios.noticed_inputs(mesh, seed)):
        groups = inputs.topk_idx.reshape(mesh.size // case.R, -1, case.K)
        sizes = np.concatenate([notify_programs.true_sizes(group, case) for group in groups])
        assert told_alone[f"{number}"]["per expert"] == sizes.tolist()
        assert told_alone[f"{number}"]["rows"] == sizes.sum(axis=1).tolist()
        assert told_alone[f"{number}"]["capacity"] == -(-sizes.sum(axis=1).max() // 4) * 4
        for name in ("tokens", "weights", "sizes", "dropped"):
            plain = bytes_of_shards(arrays[f"{number} plain {name}"])
            for way in ("along", "inside"):
                assert bytes_of_shards(arrays[f"{number} {way} {name}"]) == plain
