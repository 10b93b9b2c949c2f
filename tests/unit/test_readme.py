"""The README's code runs as it stands, on inputs of the shapes it names."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np

README = pathlib.Path(__file__).parents[2] / "README.md"
E, K, H, F, TOKENS = 16, 2, 64, 128, 8 * 32


def test_the_layer_of_the_readme_runs_and_sums_the_chosen_experts(rng):
    code, _ = code_blocks()
    x = rng.standard_normal((TOKENS, H), np.float32)
    topk_idx = np.argsort(rng.random((TOKENS, E)))[:, :K].astype(np.int32)
    topk_weights = rng.random((TOKENS, K), np.float32)
    w_in = rng.standard_normal((E, H, F), np.float32) / 8
    w_out = rng.standard_normal((E, F, H), np.float32) / 8
    names = {"inputs": (x, topk_idx, topk_weights, w_in, w_out)}
    exec(compile(code, str(README), "exec"), names)

    every_expert = np.einsum("tef,efh->teh", gelu(np.einsum("th,ehf->tef", x, w_in)), w_out)
    chosen = np.take_along_axis(every_expert, topk_idx[:, :, None], axis=1)
    expected = (topk_weights[:, :, None] * chosen).sum(1)
    np.testing.assert_allclose(np.asarray(names["out"]), expected, rtol=2e-4, atol=2e-4)
    assert names["buffer"].closed


def test_the_right_sized_layer_of_the_readme_runs(rng):
    layer, right_sized = code_blocks()
    setup = layer[: layer.index("def moe(")]
    x = rng.standard_normal((TOKENS, H), np.float32)
    topk_idx = np.argsort(rng.random((TOKENS, E)))[:, :K].astype(np.int32)
    topk_weights = rng.random((TOKENS, K), np.float32)
    names = {}
    exec(compile(setup, str(README), "exec"), names)
    with names["jax_ep"].Buffer(names["mesh"], "expert", names["config"]) as buffer:
        everywhere = jax.NamedSharding(names["mesh"], names["P"]("expert"))
        inputs = (x, topk_idx, topk_weights)
        arrays = dict(
            zip(("x", "topk_idx", "topk_weights"), jax.device_put(inputs, everywhere), strict=True)
        )
        names |= arrays | {"buffer": buffer, "experts": lambda rows, sizes: 2 * rows}
        exec(compile(right_sized, str(README), "exec"), names)
        expected = 2 * topk_weights.sum(1, keepdims=True) * x
        np.testing.assert_allclose(np.asarray(names["out"]), expected, rtol=0, atol=1e-4)


def code_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def gelu(x: np.ndarray) -> np.ndarray:
    return np.asarray(jax.nn.gelu(jnp.asarray(x)))
