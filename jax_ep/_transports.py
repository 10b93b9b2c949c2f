"""Which compiled module carries rows between the GPUs of several processes."""

import dataclasses
import os
from collections.abc import Sequence

from .errors import EpUsageError

# Sends everything between processes through NVSHMEM's puts, also where a GPU could write to its
# peer: how the way between nodes is tried on one host.
FORCE_REMOTE = "JAX_EP_FORCE_REMOTE"
# "nvshmem": takes NVSHMEM on one host too, and writes directly where it can.
TRANSPORT = "JAX_EP_TRANSPORT"


@dataclasses.dataclass(frozen=True)
class Wishes:
    """What the environment asks for.

    Attributes:
        only_puts: JAX_EP_FORCE_REMOTE.
        nvshmem: whether NVSHMEM is to be taken on one host too.
    """

    only_puts: bool
    nvshmem: bool

    @classmethod
    def read(cls) -> "Wishes":
        """Those of this process. Raises EpUsageError for a variable that has no meaning."""
        force, transport = os.getenv(FORCE_REMOTE, "0"), os.getenv(TRANSPORT, "")
        if force not in ("", "0", "1"):
            raise EpUsageError(f"{FORCE_REMOTE}={force!r} in the environment: pass 0 or 1")
        if transport not in ("", "nvshmem"):
            raise EpUsageError(
                f"{TRANSPORT}={transport!r} in the environment: pass 'nvshmem', or leave it away"
            )
        return cls(only_puts=force == "1", nvshmem=force == "1" or transport == "nvshmem")


@dataclasses.dataclass(frozen=True)
class Process:
    """One process of a buffer.

    Attributes:
        index: JAX's.
        host: what its host calls itself.
        boot: what tells its host from others, whatever they call themselves.
        gpus: how many of its GPUs are in the mesh.
        has_nvshmem: whether its installation has the module for NVSHMEM.
    """

    index: int
    host: str
    boot: str
    gpus: int
    has_nvshmem: bool


def module_for_gpus(processes: Sequence[Process], wishes: Wishes) -> str:
    """``"cuda"`` (CUDA IPC, one host) or ``"nvshmem"``: the module for GPUs of these processes.

    Raises:
        EpUsageError: no module serves them. The message says what would.
    """
    first = processes[0]
    elsewhere = next((p for p in processes if p.boot != first.boot), None)
    if elsewhere is None and not wishes.nvshmem:
        return "cuda"
    if elsewhere is not None:
        why = (
            f"process {first.index} is on host {first.host!r} and process {elsewhere.index} on "
            f"host {elsewhere.host!r}, so that"
        )
    else:
        why = f"{FORCE_REMOTE} or {TRANSPORT} asks for NVSHMEM, so that"
    several = next((p for p in processes if p.gpus != 1), None)
    if several is not None:
        raise EpUsageError(
            f"{why} every process must have one GPU in the mesh, and process {several.index} has "
            f"{several.gpus}: start one process per GPU across nodes "
            "(jax.distributed.initialize(..., local_device_ids=[i])), or pass backend='reference'"
        )
    without = next((p for p in processes if not p.has_nvshmem), None)
    if without is not None:
        raise EpUsageError(
            f"{why} rows travel over NVSHMEM, for which the installation of process "
            f"{without.index} has no module: pip install nvidia-nvshmem-cu13 (or -cu12, as nvcc's "
            "version is), then build with 'pip install --no-build-isolation . -C "
            "cmake.define.JAX_EP_NVSHMEM=ON', or pass backend='reference'"
        )
    return "nvshmem"


def window_for_all(given_back: Sequence[Sequence[Sequence[int]]], num_bytes: int) -> int:
    """The number of a window that a new buffer can have; -1: there is none.

    Args:
        given_back: ``(number, bytes)`` of the windows that each process has given back. A number
            means the same window in all of them.
        num_bytes: what the buffer needs.
    """
    common = set.intersection(*({(n, size) for n, size in windows} for windows in given_back))
    return min((number for number, size in common if size == num_bytes), default=-1)
