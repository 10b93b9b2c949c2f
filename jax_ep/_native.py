"""The only importer of compiled modules: loads each once and registers its contents with JAX."""

import ctypes
import functools
import importlib
import importlib.util
import os
import pathlib
from types import ModuleType
from typing import Any

import jax

from .errors import EpUsageError

# Platforms as platform_of() names them: the compiled module, and JAX's name where FFI targets are
# registered.
_MODULES = {
    "cpu": ("jax_ep._ffi_cpu", "cpu"),
    "cuda": ("jax_ep._ffi_cuda", "CUDA"),
    "nvshmem": ("jax_ep._ffi_nvshmem", "CUDA"),  # GPUs of several nodes
}
# Two modules of one platform may be loaded: the targets of the second have names of their own.
_TARGET_SUFFIXES = {"nvshmem": "_nvshmem"}
_JAX_BACKENDS = {"nvshmem": "cuda"}
_NVSHMEM_LIBRARY = "libnvshmem_host.so.3"

# A module that has it has all of the low-latency operations.
LOW_LATENCY_TARGET = "jax_ep_ll_dispatch"


def platform_of(device: jax.Device) -> str:
    """``"cpu"``, ``"cuda"``, or what JAX calls another platform (``"gpu"`` for one not CUDA's)."""
    if device.platform != "gpu":
        return device.platform
    return "cuda" if "cuda" in device.client.platform_version.lower() else device.platform


def is_built(platform: str) -> bool:
    """Whether this installation should have native code for a platform, as platform_of names it.

    The module for CPUs is part of every installation: where it is missing, load() says so.
    """
    if platform not in _MODULES:
        return False
    return platform == "cpu" or importlib.util.find_spec(_MODULES[platform][0]) is not None


def serves(platform: str, mode: str) -> bool:
    """Whether this installation's native code for a platform has the operations of a mode."""
    if not is_built(platform):
        return False
    return mode != "low_latency" or LOW_LATENCY_TARGET in load(platform).registrations()


def target_suffix(module: ModuleType | None) -> str:
    """What the names of a module's targets end with where XLA knows them."""
    platforms = [name for name, (path, _) in _MODULES.items() if module and module.__name__ == path]
    return _TARGET_SUFFIXES.get(platforms[0], "") if platforms else ""


def load(platform: str = "cpu") -> ModuleType:
    """Returns the compiled module of a platform, its types and targets registered.

    XLA accepts FFI types only once its backend exists, so this is called when a Buffer is made, not
    at import.

    Raises:
        EpUsageError: the module was not built, or was built for another Python.
    """
    return _load(platform)


def window_layout(**shape: int) -> dict[str, Any]:
    """Regions and sizes of a window; see ``window_layout`` in ffi/module.cc. Needs no device.

    Raises:
        EpUsageError: the module was not built, or was built for another Python.
    """
    return _import("cpu").window_layout(**shape)


@functools.cache
def _load(platform: str) -> ModuleType:
    module = _import(platform)
    _, ffi_platform = _MODULES[platform]
    jax.devices(_JAX_BACKENDS.get(platform, platform))
    for type_name, capsules in module.type_registrations().items():
        jax.ffi.register_ffi_type(type_name, capsules, platform=ffi_platform)
    for target, stages in module.registrations().items():
        name = target + _TARGET_SUFFIXES.get(platform, "")
        jax.ffi.register_ffi_target(name, stages, platform=ffi_platform, api_version=1)
    return module


def _import(platform: str) -> ModuleType:
    name, _ = _MODULES[platform]
    try:
        if platform == "nvshmem":
            _load_nvshmem()
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise EpUsageError(
            f"backend='native' needs the compiled module {name}, which did not load ({error}); "
            "build it with 'pip install .' in the project's root, or pass backend='reference'"
        ) from error


def _load_nvshmem() -> None:
    """Loads NVSHMEM's library, for the module to find it by name.

    Where it lies is known here only: the module is not told a folder when it is built, since the
    wheel may lie elsewhere than the project, and NVSHMEM_HOME anywhere.
    """
    for folder in _nvshmem_folders():
        if (folder / _NVSHMEM_LIBRARY).is_file():
            ctypes.CDLL(str(folder / _NVSHMEM_LIBRARY), mode=ctypes.RTLD_GLOBAL)
            return


def _nvshmem_folders() -> list[pathlib.Path]:
    """Where the library may be; elsewhere the dynamic loader looks by itself."""
    home = os.getenv("NVSHMEM_HOME")
    folders = [pathlib.Path(home) / "lib"] if home else []
    try:
        wheel = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:
        wheel = None
    if wheel is not None:
        folders += [pathlib.Path(path) / "lib" for path in wheel.submodule_search_locations or []]
    return folders
