"""What the tests of this folder need of the machine."""

import pathlib
import sys

import cases
import gpu_world
import pytest

# Programs and tables that those of the CPU backend have already.
_TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path += [str(_TESTS / folder) for folder in ("ops", "faults")]


@pytest.fixture(autouse=True)
def _cuda_backend():
    """Tests here need a GPU and the compiled module; without them they are skipped, saying why."""
    gpu_world.require_cuda(1)


@pytest.fixture
def seed() -> int:
    """Fresh for every test, and printed."""
    fresh = cases.fresh_seed()
    print(f"{cases.SEED_VARIABLE}={fresh}")
    return fresh


@pytest.fixture(params=[1, 2])
def num_gpus(request) -> int:
    """Ranks of the group: on one GPU, and on two."""
    gpu_world.require_cuda(request.param)
    return request.param
