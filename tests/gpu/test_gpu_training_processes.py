"""The training example in two processes with a GPU each saves a run that others go on with.

JAX_EP_REQUIRE_EXAMPLES=1 turns the skip where its packages are missing into a failure.
"""

import importlib.util
import os
import pathlib
import sys

import gpu_world
import pytest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "processes"))
import example_run

PACKAGES = ("flax", "optax", "orbax", "matplotlib", "rich")
REQUIRE_VARIABLE = "JAX_EP_REQUIRE_EXAMPLES"
ON_GPUS = {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
# Compiling is most of what it does.
QUICK = {"XLA_FLAGS": "--xla_gpu_autotune_level=0"}


@pytest.fixture(autouse=True)
def _packages():
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        reason = f"needs {', '.join(missing)}: pip install '.[examples]'"
        if os.environ.get(REQUIRE_VARIABLE, "0") not in ("", "0"):
            pytest.fail(f"{reason} ({REQUIRE_VARIABLE} is set)")
        pytest.skip(reason)


def test_a_run_is_saved_and_goes_on(tmp_path):
    """First with processes that see their own GPU only, as Slurm starts them; then with such that
    see both and take one."""
    gpu_world.require_cuda(2)
    alone = [ON_GPUS | QUICK | {"CUDA_VISIBLE_DEVICES": f"{process}"} for process in range(2)]
    sees_both = [ON_GPUS | QUICK | {"JAX_LOCAL_DEVICE_IDS": f"{process}"} for process in range(2)]
    for printed in example_run.save_and_resume(tmp_path, alone, sees_both):
        assert "on 2 gpu devices, backend native" in printed
