"""Eight virtual CPU devices for every test, fresh seeds, and both backends."""

import os

import xla_flags

for _flag in ("--xla_force_host_platform_device_count=8", xla_flags.quick_to_compile()):
    if _flag.split("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flag}".strip()

import cases  # noqa: E402  (after the flags: importing jax may read them)
import numpy as np  # noqa: E402
import pytest  # noqa: E402


@pytest.fixture(params=["reference", "native"])
def backend(request) -> str:
    """Both backends. Where the compiled module is missing, a native buffer fails the test."""
    return request.param


@pytest.fixture(params=["native", "window"])
def payload(request) -> str:
    """For ``programs.make_buffer``: rows read in place by the receiver, or carried by windows."""
    return request.param


@pytest.fixture
def rng(request) -> np.random.Generator:
    """A generator with a fresh seed, which pytest shows when the test fails."""
    seed = cases.fresh_seed()
    print(f"{cases.SEED_VARIABLE}={seed}")
    return np.random.default_rng(seed)


def pytest_report_header() -> str:
    """Names the seed variable where every run can see it."""
    import jax

    seed = os.environ.get(cases.SEED_VARIABLE, "fresh for each test, printed with its failure")
    return f"jax {jax.__version__}, {cases.SEED_VARIABLE}: {seed}"
