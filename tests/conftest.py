"""Eight virtual CPU devices for every test, fresh seeds, and both backends."""

import os

import xla_flags

for _flag in ("--xla_force_host_platform_device_count=8", xla_flags.quick_to_compile()):
    if _flag.split("=")[0] not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flag}".strip()

import cases  # noqa: E402  (after the flags: importing jax may read them)
import numpy as np  # noqa: E402
import pytest  # noqa: E402

_TABLE_SEED = cases.fresh_seed()  # of --table-share


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


def pytest_addoption(parser) -> None:
    parser.addoption(
        "--table-share",
        type=float,
        default=1.0,
        help="the part of the tests marked 'table' to run, drawn afresh (default 1: all of them)",
    )


def pytest_collection_modifyitems(config, items) -> None:
    share = config.getoption("--table-share")
    if share >= 1:
        return
    rng = np.random.default_rng(_TABLE_SEED)
    left_out = {
        item for item in items if item.get_closest_marker("table") and rng.random() >= share
    }
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def pytest_report_header(config) -> list[str]:
    """Names the seed variable where every run can see it."""
    import jax

    seed = os.environ.get(cases.SEED_VARIABLE, "fresh for each test, printed with its failure")
    header = [f"jax {jax.__version__}, {cases.SEED_VARIABLE}: {seed}"]
    share = config.getoption("--table-share")
    if share < 1:
        header.append(f"{share} of the tables, by {cases.SEED_VARIABLE}={_TABLE_SEED}")
    return header
