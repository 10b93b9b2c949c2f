"""Processes that come late, close and go in either order, or are killed in a long program.

The judgements serve the tests of GPUs, too.
"""

import time

import launch
import pytest

LATE_S = 1.5
ENDS_WITHIN_S = 20


def test_late_processes_are_waited_for(tmp_path, crews):
    assert_late_processes_are_waited_for(tmp_path, crews(2, 1))


def assert_late_processes_are_waited_for(folder, crew) -> None:
    first, last = crew.run(folder, "late_starters", {"late_s": LATE_S})
    for operation in first["operations"] + last["operations"]:
        assert operation["same"]
        assert operation["check"]["type"] is None, operation["check"]["text"]
    # The one that is on time waits in the operation; half the delay allows for slow starts.
    assert first["operations"][0]["waited_s"] > LATE_S / 2
    assert last["operations"][1]["waited_s"] > LATE_S / 2


@pytest.mark.parametrize("first", [0, 1])
def test_whoever_closes_and_goes_first(tmp_path, first):
    with launch.crew(tmp_path / "crew", processes=2) as crew:
        result = left_behind(tmp_path, crew, first)
    assert f"is in process {first}" in result["left"]["text"]
    assert "which has closed the buffer" in result["left"]["text"]


def left_behind(folder, crew, first: int) -> dict:
    """One process after the other closes its buffer and ends, and well; what the last one saw."""
    job = crew.start(folder, "left_behind", {"first": first})
    job.wait_for_file(f"{first}.json")
    crew.release(first)
    result = job.finish(limit_s=60)[1 - first]
    crew.release(1 - first)
    crew.dismiss(limit_s=ENDS_WITHIN_S)
    assert "EpTimeoutError" in result["left"]["text"]
    assert result["left"]["seconds"] < 6, "the deadline is 2 s"
    assert result["closed"]["type"] is None, result["closed"]["text"]
    assert result["alive"]
    return result


def test_a_process_killed_in_a_program_leaves_the_other_to_end_by_itself(tmp_path):
    with launch.crew(tmp_path / "crew", processes=2) as crew:
        result = killed_in_a_program(tmp_path, crew, operations=300)
    assert "process 1" in result["run"]["text"]


def killed_in_a_program(folder, crew, operations: int) -> dict:
    """What the first process sees of the other's death, once it has ended by itself, and well."""
    job = crew.start(folder, "killed_in_a_program", {"operations": operations})
    for process in range(2):
        job.wait_for_file(f"step-{process}")
    time.sleep(0.3)  # into the programs
    job.kill(1)
    (result,) = job.finish(killed=(1,), limit_s=60)
    began = time.monotonic()
    crew.dismiss(killed=(1,), limit_s=ENDS_WITHIN_S)
    print(f"ended {time.monotonic() - began:.1f} s after it could")
    assert "EpTimeoutError" in result["run"]["text"]
    assert "rank 1" in result["run"]["text"]
    assert result["run"]["seconds"] < 6, "the deadline is 2 s"
    assert result["again"]["type"] is not None, "a poisoned buffer refuses"
    assert result["again"]["seconds"] < 2
    assert result["alive"]
    return result
