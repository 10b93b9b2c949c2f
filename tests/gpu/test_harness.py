"""The native harness: virtual ranks on one GPU and on all, faults, captured graphs, sanitizers."""

import os
import pathlib
import re
import shutil
import subprocess

import cases
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# A place where a caller has built it already; otherwise the first test builds it.
HARNESS_VARIABLE = "JAX_EP_CUDA_HARNESS"


@pytest.fixture(scope="module")
def harness(tmp_path_factory) -> pathlib.Path:
    ready = os.environ.get(HARNESS_VARIABLE)
    if ready:
        return pathlib.Path(ready)
    program = tmp_path_factory.mktemp("harness") / "cuda_harness"
    script = ROOT / "tests" / "native" / "cuda_build.sh"
    run([str(script), str(program)], timeout_s=280)
    return program


def run(command: list[str], timeout_s: float) -> str:
    """Output of a command that must succeed."""
    environment = os.environ | {"CUDA_MODULE_LOADING": "EAGER"}
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        cwd=ROOT,
        env=environment,
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout[-6000:]}"
    return done.stdout


def test_virtual_ranks_and_faults(harness):
    seed = cases.fresh_seed()
    output = run([str(harness), "check", str(seed)], timeout_s=240)
    assert f"seed {seed}" in output
    assert "\n0 wrong" in output


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer(harness, tool, num_ranks):
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not pathlib.Path(sanitizer).exists():
        pytest.fail("compute-sanitizer, which comes with CUDA, was not found")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", str(harness), "small"]
    output = run([*command, str(cases.fresh_seed()), str(num_ranks)], timeout_s=180)
    assert "\n0 wrong" in output
    summary = {
        "memcheck": r"ERROR SUMMARY: 0 errors",
        "racecheck": r"RACECHECK SUMMARY: \d+ hazards? displayed \(0 errors",
    }
    assert re.search(summary[tool], output), output[-6000:]
