"""What the other processes see when one dies, is late, or runs something else."""

import pathlib
import re

import launch

SHARED = pathlib.Path("/dev/shm")


def shared_files() -> set[str]:
    return {path.name for path in SHARED.glob("*jax_ep*")} if SHARED.is_dir() else set()


def test_a_killed_process_is_named_at_once_and_leaves_nothing(tmp_path):
    before = shared_files()
    with launch.crew(tmp_path, processes=3) as crew:
        job = crew.start(tmp_path, "killed_in_a_step")
        for process in range(3):
            job.wait_for_file(f"step-{process}")
        job.kill(2)
        results = job.finish(killed=(2,), limit_s=60)
        crew.dismiss(killed=(2,))
    assert shared_files() == before
    for result in results:
        assert "EpTimeoutError" in result["run"]["text"]
        assert re.search(
            r"rank 2 is in process 2 \(pid \d+\), which has died", result["run"]["text"]
        )
        assert result["run"]["seconds"] < 15, "the deadline of 20 s need not be waited for"
        assert result["check"]["type"] == "EpTimeoutError"
        assert result["check"]["peer"] == 2
        assert "EpTimeoutError" in result["again"]["text"]
        assert result["again"]["seconds"] < 2
        assert result["reset"]["type"] == "EpError"
        assert re.search(r"process 2 \(pid \d+\), which has died", result["reset"]["text"])


def test_faults_are_told_in_every_process_and_mended_by_a_reset_of_all(tmp_path, crews):
    results = crews(2, 2).run(tmp_path, "faults_and_resets")
    for process, result in enumerate(results):
        mismatch = result["mismatch"]
        assert "EpMismatchError" in mismatch["run"]["text"]
        assert mismatch["check"]["type"] == "EpMismatchError"
        assert mismatch["run"]["seconds"] < 1.5, "a mismatch is seen, not waited for"

        late = result["late"]
        assert "EpTimeoutError" in late["run"]["text"]
        assert "rank 3 is in process 1" in late["run"]["text"]
        assert late["check"]["peer"] == 3

        absent = result["absent"]
        assert (absent["run"]["type"] is None) == (process == 1)
        assert absent["check"]["type"] == "EpTimeoutError"
        assert absent["check"]["peer"] in (2, 3)
        assert "process 1" in absent["check"]["text"]

        for name in ("mismatch", "late", "absent"):
            assert "Ep" in result[name]["refused"]["text"], "a poisoned buffer refuses"
            assert result[name]["refused"]["seconds"] < 1
            assert result[name]["healthy"], name
        assert result["stats"] == 4, "epochs since the last reset"


def test_processes_close_in_any_order(tmp_path):
    results = launch.run(tmp_path, "teardown", processes=2)
    for process, result in enumerate(results):
        text = result["left"]["text"]
        assert f"is in process {1 - process}" in text
        assert "which has closed the buffer" in text
        assert result["left"]["seconds"] < 5
