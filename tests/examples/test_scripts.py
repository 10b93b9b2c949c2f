"""The examples as a person starts them: from a shell, with no flags of XLA set."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def start(*arguments, timeout=280, **environment):
    clean = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    clean |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"} | environment
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=clean,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def test_moe_layer_matches_the_dense_layer():
    result = start(EXAMPLES / "01_moe_layer.py")
    assert result.returncode == 0, result.stderr
    assert "16 experts on 8 ranks" in result.stdout
    errors = re.findall(r"(\S+) of its largest value away from the dense layer", result.stdout)
    assert len(errors) == 2
    assert all(float(error) < 1e-5 for error in errors)


def test_right_sized_takes_less_than_the_worst_case():
    """The script itself compares the two results; here are its claims about memory and compiles."""
    script = [EXAMPLES / "right_sized.py", "--tokens", 64, "--hidden", 256, "--steps", 4]
    result = start(*script, "--experts", 16, "--topk", 2, "--bucket", 128)
    assert result.returncode == 0, result.stderr
    lines = re.findall(r"^(.+): .* ms a step, (\d+) MiB .*, (\d+) compiled", result.stdout, re.M)
    (right, right_mib, num_programs), (worst, worst_mib, one) = lines
    assert (right, worst) == ("right-sized", "worst case")
    assert int(worst_mib) >= 2 * int(right_mib)
    assert int(num_programs) <= 2
    assert int(one) == 1


def test_train_moe_lm_trains_and_goes_on_with_the_other_backend(tmp_path):
    script = [EXAMPLES / "train_moe_lm.py", "--ranks", 2, "--seed", 5, "--out", tmp_path / "out"]
    script += ["--checkpoint-dir", tmp_path / "checkpoints"]
    result = start(*script, "--steps", 3)
    assert result.returncode == 0, result.stderr
    assert "on 2 cpu devices, backend native" in result.stdout
    for line in ("validation loss", "unigram entropy", "time", "loss curve"):
        assert re.search(rf"^{line} .*\S", result.stdout, re.MULTILINE), result.stdout
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
    losses = read_losses(tmp_path)
    assert list(losses["train"]) == [0, 1, 2]
    assert list(losses["validation"]) == [3]

    refused = start(*script, "--steps", 3)
    assert refused.returncode != 0
    assert "pass --resume" in refused.stderr
    longer = start(*script, "--steps", 4, "--backend", "reference", "--resume")
    assert longer.returncode == 0, longer.stderr
    assert "backend reference" in longer.stdout
    resumed = read_losses(tmp_path)
    assert resumed["train"].pop(3) < 6
    assert resumed["train"] == losses["train"]
    assert list(resumed["validation"]) == [3, 4]


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_decode_prints_speed_and_what_overlap_hides(backend):
    """It compares the outputs of both ways itself."""
    sizes = ["--steps", 3, "--hidden", 64, "--ranks", 4, "--layers", 2, "--backend", backend]
    result = start(EXAMPLES / "decode.py", *sizes)
    assert result.returncode == 0, result.stderr
    assert f"2 layers, 16 experts on 4 cpu devices, backend {backend}" in result.stdout
    for way in ("fused, one after another", "in halves, interleaved", "experts alone"):
        assert re.search(
            rf"^{way}: [\d.]+ ms a step, [\d,]+ tokens/s$", result.stdout, re.MULTILINE
        )
    assert re.search(r"hidden by overlap: -?\d+ %|communication hidden: none", result.stdout)


def test_decode_refuses_odd_batches():
    result = start(EXAMPLES / "decode.py", "--tokens", 7)
    assert result.returncode == 2
    assert "--tokens 7 must be even" in result.stderr


def read_losses(folder):
    losses = json.loads((folder / "out" / "losses.json").read_text())
    return {name: dict(map(tuple, pairs)) for name, pairs in losses.items()}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume"], "--resume needs --checkpoint-dir"),
        (["--steps", "0"], "--steps 0 must be at least 1"),
        (["--ranks", "3"], "--ranks 3 must divide"),
    ],
)
def test_unusable_arguments_are_refused(arguments, message):
    result = start(EXAMPLES / "train_moe_lm.py", *arguments)
    assert result.returncode == 2
    assert message in result.stderr
