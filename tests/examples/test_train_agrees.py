"""The native backend trains the same model as the reference backend, and the model learns."""

import numpy as np


def losses(history):
    return np.array([loss for _, loss in sorted(history.train.items())])


def test_native_and_reference_agree_over_20_steps(small_run, seed):
    runs = {
        backend: small_run(backend=backend, steps=20, seed=seed)
        for backend in ("native", "reference")
    }
    native, reference = losses(runs["native"]), losses(runs["reference"])
    assert reference[-1] < reference[0] - 0.5, "nothing was learned, so agreement shows nothing"
    np.testing.assert_allclose(native, reference, rtol=1e-4)
    np.testing.assert_allclose(
        list(runs["native"].validation.values()),
        list(runs["reference"].validation.values()),
        rtol=1e-4,
    )


def test_the_number_of_ranks_does_not_change_the_run(small_run, seed):
    same = {"steps": 10, "seed": seed, "num_layers": 1, "capacity_factor": None}
    alone = losses(small_run(backend="native", num_ranks=1, **same))
    spread = losses(small_run(backend="native", num_ranks=4, **same))
    np.testing.assert_allclose(spread, alone, rtol=1e-4)
