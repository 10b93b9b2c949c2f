"""The training example in two processes, as a person or a launcher starts it."""

import json
import os
import pathlib
import subprocess
import sys

import launch

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "examples" / "train_moe_lm.py"


def run(folder: pathlib.Path, *arguments: object, environments: list[dict], limit_s: float) -> str:
    """Runs it to its end, a process for each of ``environments``; gives what the first printed."""
    folder.mkdir(parents=True, exist_ok=True)
    inherited = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    address, processes = f"127.0.0.1:{launch.free_port()}", []
    try:
        for process, environment in enumerate(environments):
            place = ["--distributed", address, str(len(environments)), str(process)]
            with open(folder / f"{process}.log", "wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, str(SCRIPT), *map(str, arguments), *place],
                        env=inherited | environment,
                        cwd=folder,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        for process in processes:
            process.wait(limit_s)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait(30)
    logs = [(folder / f"{p}.log").read_text(errors="replace") for p in range(len(processes))]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(
        f"--- process {p}\n{log[-5000:]}" for p, log in enumerate(logs)
    )
    return logs[0]


def save_and_resume(folder: pathlib.Path, first: list[dict], second: list[dict]) -> list[str]:
    """Three steps that are saved, then one more in new processes, with their environments.

    Returns what both runs printed.
    """
    options = ["--seed", 5, "--out", folder / "out", "--checkpoint-dir", folder / "saved"]
    printed = [run(folder / "first", *options, "--steps", 3, environments=first, limit_s=100)]
    before = _losses(folder)
    options += ["--steps", 4, "--resume"]
    printed.append(run(folder / "second", *options, environments=second, limit_s=100))
    after = _losses(folder)
    assert list(before["train"]) == [0, 1, 2]
    assert list(before["validation"]) == [3]
    assert after["train"].pop(3) < before["train"][0], "the loss of what went on"
    assert after["train"] == before["train"]
    assert list(after["validation"]) == [3, 4]
    return printed


def _losses(folder: pathlib.Path) -> dict[str, dict[int, float]]:
    losses = json.loads((folder / "out" / "losses.json").read_text())
    return {name: dict(map(tuple, pairs)) for name, pairs in losses.items()}
