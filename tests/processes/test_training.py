"""Models train alike in one process and in several."""

import dataclasses
import pathlib
import sys

import cases
import launch
import numpy as np
import scenarios
import training_scenarios
from saved import bytes_of_shards, saved_by_rank

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


def test_twenty_steps_have_the_bits_of_one_process(tmp_path, crews):
    seed = cases.fresh_seed()
    print(f"{cases.SEED_VARIABLE}={seed}")
    crews(2, 2).run(tmp_path, "train_to_the_bit", {"seed": seed, "steps": 20})
    mesh = scenarios.expert_mesh(4)
    alone = assert_bits_of_one_process(tmp_path, mesh, seed, steps=20)
    other = training_scenarios.trained(mesh, seed, 20, backend="reference")
    np.testing.assert_allclose(alone.losses(), other.losses(), rtol=1e-3)


def assert_bits_of_one_process(folder, mesh, seed: int, steps: int) -> training_scenarios.Trained:
    """Trains in this process, too: every error and, at the end, every parameter is the job's."""
    alone = training_scenarios.trained(mesh, seed, steps)
    losses = alone.losses()
    print(f"losses {losses[0]:.4f} to {losses[-1]:.4f}")
    assert losses[-1] < 0.8 * losses[0], "nothing was learned, so agreement shows nothing"
    seen = saved_by_rank(folder, 2)
    assert seen.keys() == alone.arrays().keys()
    for name, array in alone.arrays().items():
        assert list(seen[name].values()) == bytes_of_shards(array), name
    for name in ("router", "head"):
        copies = bytes_of_shards(alone.parameters[name])
        assert copies == copies[:1] * mesh.size, f"the ranks' copies of {name} differ"
    return alone
