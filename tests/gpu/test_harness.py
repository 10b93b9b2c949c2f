"""The native harness: virtual ranks on one GPU and on all, faults, captured graphs, sanitizers."""

import os
import pathlib
import re
import shutil
import subprocess

import cases
import gpu_world
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
# A place where a caller has built it already; otherwise the first test builds it.
HARNESS_VARIABLE = "JAX_EP_CUDA_HARNESS"


@pytest.fixture(scope="module")
def harness(tmp_path_factory) -> pathlib.Path:
    gpu_world.require_cuda(1)  # before a minute of compiling
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


# Racecheck knows barriers, not words that are stored with release and loaded with acquire, nor
# the barriers of bulk copies. What these order it reports; the pairs below are what was seen and
# judged: two atomics of libcu++, producers and consumers of combine's rings, and the outbox
# between the warps that send and the one that publishes. Any other hazard is an error.
ATOMICS, COPIES = "cuda_ptx_generated.h", "cp_async_bulk.h"
KERNEL = "bulk kernel"  # its inlined stores, of which no file is known
JUDGED = {
    frozenset(pair)
    for pair in (
        (ATOMICS, ATOMICS),
        (ATOMICS, KERNEL),
        ("outbox.cuh", "outbox.cuh"),
        ("outbox.cuh", KERNEL),
        ("combine_items.cuh", "combine_feed.cuh"),
        ("combine_items.cuh", "combine_bulk.cuh"),
        ("combine_feed.cuh", "combine_bulk.cuh"),
        (COPIES, "combine_bulk.cuh"),
    )
}
SITE = re.compile(r"(?:Read|Write) access at (.*?)\+0x[0-9a-f]+(?: in ([\w.]+):\d+)?")


def hazards(output: str) -> set[frozenset[str]]:
    """Pairs of places, a source file each, or what stands for it."""
    found, first = set(), ""
    for line in output.splitlines():
        site = SITE.search(line)
        if site is None:
            continue
        place = site[2] or (KERNEL if "_bulk_kernel<" in site[1] else site[1])
        if "Race reported between" in line:
            first = place
        else:
            found.add(frozenset((first, place)))
    return found


def sanitized(harness, tool: str, num_ranks: int, *options: str) -> str:
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not pathlib.Path(sanitizer).exists():
        pytest.fail("compute-sanitizer, which comes with CUDA, was not found")
    command = [sanitizer, "--tool", tool, *options, str(harness), "small"]
    output = run([*command, str(cases.fresh_seed()), str(num_ranks)], timeout_s=180)
    assert "\n0 wrong" in output
    return output


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_memcheck(harness, num_ranks):
    output = sanitized(harness, "memcheck", num_ranks, "--error-exitcode", "9")
    assert "ERROR SUMMARY: 0 errors" in output, output[-6000:]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_racecheck(harness, num_ranks):
    options = (
        "--racecheck-report",
        "analysis",
        "--show-backtrace",
        "no",
        "--print-limit",
        "100000",
    )
    output = sanitized(harness, "racecheck", num_ranks, *options)
    assert "RACECHECK SUMMARY" in output
    assert hazards(output) <= JUDGED
