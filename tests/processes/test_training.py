"""The example's model trains alike in one process and in several."""

import dataclasses
import pathlib
import sys

import launch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests" / "examples")]

from small_settings import SMALL  # noqa: E402  (after the path)


def test_twenty_steps_give_the_losses_of_one_process(tmp_path, crews):
    """Two processes of two ranks, one of which makes its buffer a second after the other."""
    model = dataclasses.asdict(SMALL) | {"steps": 20, "num_layers": 1}
    with launch.crew(tmp_path / "one", processes=1, devices=4) as one:
        job = one.start(tmp_path / "one", "train", {"model": model})
        settings = {"model": model, "late_s": {"1": 1}}
        together = crews(2, 2).run(tmp_path / "two", "train", settings)
        (alone,) = job.finish()
        one.dismiss()
    assert len(alone["losses"]) == 20
    assert alone["losses"][-1] < alone["losses"][0] - 1
    for result in together:
        assert result["losses"] == alone["losses"]
        assert result["restored"]
