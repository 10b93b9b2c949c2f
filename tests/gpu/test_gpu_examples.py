"""Examples that look for GPUs run on them, in a process of their own."""

import os
import pathlib
import subprocess
import sys

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"


def test_right_sized(num_gpus):
    small = ("--tokens", "256", "--hidden", "512", "--steps", "4", "--bucket", "128")
    done = subprocess.run(
        [sys.executable, "-P", str(EXAMPLES / "right_sized.py"), *small],
        env=os.environ
        | {
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(num_gpus))),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "0",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:]
    assert f"{num_gpus} ranks, 256 tokens" in done.stdout
    assert "backend native" in done.stdout
    assert "right-sized: " in done.stdout
    assert "worst case: " in done.stdout
