"""A run that was stopped and resumed is the run that was never stopped."""

import dataclasses
import functools

import numpy as np
import pytest
from moe_lm.checkpoint import Checkpoints
from moe_lm.records import History
from small_settings import SMALL


class StoppedError(Exception):
    """Stands for whatever ends a process in the middle of a run."""


def stop_after(last_step):
    def on_step(report):
        if report.step == last_step:
            raise StoppedError

    return on_step


def test_resumed_losses_are_the_uninterrupted_ones(small_run, tmp_path, seed):
    settings = dataclasses.replace(SMALL, seed=seed, num_layers=1)
    run = functools.partial(small_run, backend="native", num_ranks=2, seed=seed, num_layers=1)
    whole = run()
    with pytest.raises(StoppedError), Checkpoints(tmp_path, settings) as checkpoints:
        run(checkpoints=checkpoints, on_step=stop_after(12))

    # Saved after 8 steps; when it is finished, there is nothing more to do.
    for steps_left in (range(8, 20), range(0)):
        reports = []
        with Checkpoints(tmp_path, settings) as checkpoints:
            resumed = run(checkpoints=checkpoints, on_step=reports.append)
        assert [report.step for report in reports] == list(steps_left)
        assert resumed.train == whole.train
        assert resumed.validation == whole.validation


def test_a_checkpoint_of_other_settings_is_refused(tmp_path):
    state = {"weight": np.arange(3.0)}
    with Checkpoints(tmp_path, SMALL) as checkpoints:
        checkpoints.save(4, state, History())
    with Checkpoints(tmp_path, dataclasses.replace(SMALL, learning_rate=0.5)) as other:
        message = r"learning_rate was 0\.003 and is 0\.5.*resume with"
        with pytest.raises(ValueError, match=message):
            other.restore(state)
    with Checkpoints(tmp_path, dataclasses.replace(SMALL, steps=99)) as checkpoints:
        restored, history, step = checkpoints.restore(state)
    np.testing.assert_array_equal(restored["weight"], state["weight"])
    assert (history, step) == (History(), 4)


def test_nothing_to_resume_is_named(tmp_path):
    message = r"holds no checkpoint.*without --resume"
    with (
        Checkpoints(tmp_path, SMALL) as checkpoints,
        pytest.raises(FileNotFoundError, match=message),
    ):
        checkpoints.restore({})
