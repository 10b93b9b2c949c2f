"""Where the numbers come from: machine, software, commit."""

import datetime
import os
import pathlib
import platform
import re
import subprocess
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMMIT_VARIABLE = "JAX_EP_COMMIT"


def describe(num_ranks: int, seed: int, commit: str | None = None) -> dict[str, Any]:
    """Describes the process that measures; called there.

    Args:
        num_ranks: R.
        seed: of the inputs.
        commit: of the sources; None for the variable JAX_EP_COMMIT or, without it, what git says.
    """
    import jax
    import numpy as np

    device = jax.devices()[0]
    facts = {"device": f"{device.device_kind} x{num_ranks}", "platform": device.platform}
    if device.platform == "gpu":
        facts |= {
            "gpu": device.device_kind,
            "driver": _driver(),
            "cuda": _cuda(device.client.platform_version),
        }
    return facts | {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "processes": jax.process_count(),
        "commit": commit or os.environ.get(COMMIT_VARIABLE) or _commit() or "unknown",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seed": seed,
    }


def file_stem(device: str) -> str:
    """For example h200-x2 for "NVIDIA H200 x2"."""
    return device.lower().removeprefix("nvidia ").replace(" ", "-")


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return (done.stdout.split() or ["unknown"])[0]


def _cuda(platform_version: str) -> str:
    """The release in what the client says, which writes 13.0 as 13000."""
    found = re.search(r"cuda (\d+)", platform_version)
    if found is None:
        return platform_version
    number = int(found[1])
    return f"{number // 1000}.{number % 1000 // 10}"


def _cpu_model() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _commit() -> str | None:
    """The checkout's commit, "+" behind it if files differ; None outside a repository."""
    try:
        commit = _git("rev-parse", "HEAD")
        return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*command: str) -> str:
    done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
