"""Loads a compiled _ffi_cuda on a machine that need not have a GPU, and looks at what it offers.

Usage: check_module.py FOLDER
"""

import importlib.util
import pathlib
import sys

HALVES = ("", "_start", "_done")
TARGETS = {"jax_ep_dispatch", "jax_ep_combine", "jax_ep_combine_grad", "jax_ep_ll_combine_grad"}
TARGETS |= {"jax_ep_dispatch_routed", "jax_ep_notify"}
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


def load(folder: pathlib.Path):
    """The module in the folder, whatever package of the same name is installed."""
    (path,) = folder.glob("_ffi_cuda*.so")
    spec = importlib.util.spec_from_file_location("_ffi_cuda", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    module = load(pathlib.Path(sys.argv[1]))
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
