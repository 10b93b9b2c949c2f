"""Small training runs for the tests of the examples."""

import dataclasses
import pathlib
import sys

import cases
import numpy as np
import pytest

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "examples")]

from moe_lm import training  # noqa: E402
from moe_lm.data import Corpus, load_corpus  # noqa: E402
from small_settings import SMALL  # noqa: E402


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    return load_corpus()


@pytest.fixture
def small_run(corpus):
    """``small_run(backend=, num_ranks=, checkpoints=, on_step=, **settings)`` gives a `History`."""

    def run(*, backend="reference", num_ranks=8, checkpoints=None, on_step=None, **changes):
        settings = dataclasses.replace(SMALL, **changes)
        mesh = training.expert_mesh(num_ranks)
        with training.open_buffer(settings, mesh, backend) as buffer:
            trainer = training.Trainer(settings, buffer)
            hooks = {} if on_step is None else {"on_step": on_step}
            history = training.run(trainer, corpus, checkpoints=checkpoints, **hooks)
            buffer.check()
        assert sorted(history.train) == list(range(settings.steps))
        assert np.isfinite(list(history.train.values())).all()
        return history

    return run


@pytest.fixture
def seed() -> int:
    """A fresh seed for a run, which pytest shows when the test fails."""
    value = cases.fresh_seed()
    print(f"{cases.SEED_VARIABLE}={value}")
    return value
