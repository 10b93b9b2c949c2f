"""Which devices to measure on, and in which environment a process of its own does it.

Nothing here starts a JAX backend in this process: on GPUs that would take the memory.
"""

import importlib.util
import json
import os
import socket
import subprocess
import sys

CPU_RANKS = (2, 8)

# NVLink multicast stays off; and JAX's collectives look for it otherwise.
_CUDA_VARIABLES = {
    "JAX_PLATFORMS": "cuda,cpu",
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
}

_PROBE = "import json, jax; print(json.dumps([d.device_kind for d in jax.local_devices()]))"


def choose(requested: str | None) -> tuple[str, int]:
    """Returns the platform, "cpu" or "cuda", and the number of its devices (0: as many as asked).

    Without a request, GPUs are taken where jax_ep has a module for them and JAX sees some.

    Raises:
        ValueError: "cuda" was requested and is not there.
    """
    if requested == "cpu":
        return "cpu", 0
    if importlib.util.find_spec("jax_ep._ffi_cuda") is None:
        problem = "jax_ep has no module jax_ep._ffi_cuda: build it with JAX_EP_CUDA=ON"
    elif num_devices := _count_cuda_devices():
        return "cuda", num_devices
    else:
        problem = "JAX sees no CUDA device: install jax[cuda13] on a machine with GPUs"
    if requested == "cuda":
        raise ValueError(f"--platform cuda cannot be: {problem}, or pass --platform cpu")
    return "cpu", 0


def default_ranks(platform: str, num_devices: int) -> tuple[int, ...]:
    """All GPUs, as far as they are a power of two, which divides the experts; two sizes on CPUs."""
    if platform == "cpu":
        return CPU_RANKS
    return (1 << (num_devices.bit_length() - 1),)


def variables(platform: str, num_devices: int) -> dict[str, str]:
    """Environment variables of a process that measures with so many devices."""
    if platform == "cuda":
        return _CUDA_VARIABLES
    # XLA takes the last of repeated flags.
    flags = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={num_devices}"
    )
    return {"XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu"}


def free_port() -> int:
    """A port of this host that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _count_cuda_devices() -> int:
    quiet = _CUDA_VARIABLES | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(
        [sys.executable, "-c", _PROBE],
        env=os.environ | quiet | {"JAX_PLATFORMS": "cuda"},
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    return len(json.loads(lines[-1])) if done.returncode == 0 and lines else 0
