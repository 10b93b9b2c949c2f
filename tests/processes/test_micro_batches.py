"""``after=`` orders operations that share no data alike in all processes."""

import scenarios


def test_two_micro_batches_do_not_mix(tmp_path, crews):
    settings = {"times": 60, "ordered": True}
    results = crews(2, 2).run(tmp_path, "micro", settings)
    (alone,) = scenarios.run_micro_batches(3, ordered=True)
    # By array, then by rank; two ranks lie in each process.
    arrays = [alone[i : i + 4] for i in range(0, len(alone), 4)]
    for process, result in enumerate(results):
        own = [part.hex() for array in arrays for part in array[2 * process : 2 * process + 2]]
        assert result["found"] == [own]
