"""Programs without any token, in a process of their own (``gpu_world.EMPTY_ARRAYS`` says why)."""

import os
import pathlib
import re
import subprocess
import sys

import gpu_world

HERE = pathlib.Path(__file__).resolve().parent


def test_no_tokens():
    names = ("test_gpu_cases.py", "test_gpu_epochs.py", "test_gpu_low_latency.py")
    names += ("test_gpu_notify.py",)
    tests = [str(HERE / name) for name in names]
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    command += ["-k", "no_tokens or sizes_of_calls"]
    done = subprocess.run(
        command,
        env=os.environ | {"JAX_USE_SHARDY_PARTITIONER": "0", "XLA_PYTHON_CLIENT_PREALLOCATE": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    # Each case without tokens on two ranks, the one on one rank, and two numbers of ranks; low
    # latency's in both layouts, on two ranks and on one; a notice on one rank and on two.
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    fewest = 11 if len(gpu_world.gpus()) > 1 else 5
    assert int(passed[1]) >= fewest, done.stdout[-2000:]
