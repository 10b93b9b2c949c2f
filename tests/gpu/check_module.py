"""Loads the compiled modules for GPUs on a machine that need not have one, and looks at what they
offer: _ffi_cuda, and _ffi_nvshmem where it was built.

Usage: check_module.py FOLDER
"""

import importlib.util
import pathlib
import sys

import pytest

from jax_ep import _native

HALVES = ("", "_start", "_done")
TARGETS = {"jax_ep_dispatch", "jax_ep_combine", "jax_ep_combine_grad"}
TARGETS |= {"jax_ep_dispatch_routed", "jax_ep_notify", "jax_ep_ll_combine_grad"}
TARGETS |= {"jax_ep_dispatch_float8", "jax_ep_dispatch_routed_float8"}
LL_OPS = ("dispatch", "dispatch_float8", "combine")
TARGETS |= {f"jax_ep_ll_{op}{half}" for op in LL_OPS for half in HALVES}
SETTINGS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "hidden": 16,
    "itemsize": 4,
    "tokens_per_epoch": 8,
    "max_tokens_per_rank": 8,
    "timeout_s": 1.0,
    "fingerprint": 1,
}


def load(folder: pathlib.Path, name: str):
    """The module in the folder, whatever package of the same name is installed."""
    (path,) = folder.glob(f"{name}*.so")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_nvshmem(folder: pathlib.Path) -> None:
    _native._load_nvshmem()
    module = load(folder, "_ffi_nvshmem")
    assert set(module.registrations()) == TARGETS
    assert set(module.type_registrations()) == {"jax_ep_site_nvshmem"}
    assert not module.is_started()
    assert module.windows_given_back() == []
    assert module.next_buffer_id() > 1 << 33
    module.drop_reservation(12345)
    with pytest.raises(ValueError, match="no memory is reserved"):
        module.create_buffer(device_ordinals=[[0, -1]], id=12345, **SETTINGS)
    print("the module for NVSHMEM loads too")


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    if any(folder.glob("_ffi_nvshmem*.so")):
        check_nvshmem(folder)
    module = load(folder, "_ffi_cuda")
    assert set(module.registrations()) == TARGETS
    assert all(
        set(stages) == {"instantiate", "execute"} for stages in module.registrations().values()
    )
    assert set(module.type_registrations()) == {"jax_ep_site_cuda"}
    assert module.default_num_sms(132) == 64
    module.close_buffer(12345)
    try:
        module.create_buffer(device_ordinals=[[1_000_000]], **SETTINGS)
    except (RuntimeError, ValueError) as error:
        print(f"the module loads, and says where there is no such GPU: {error}")
    else:
        raise AssertionError("a buffer was made on a GPU that cannot exist")


if __name__ == "__main__":
    main()
