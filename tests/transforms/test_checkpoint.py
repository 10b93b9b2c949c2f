"""jax.checkpoint, alone and inside scan: the calls are made again, the bits stay."""

import collections
import dataclasses
import re

import cases
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
import test_scan

CASE = cases.Case(name="checkpoint", T=5, H=16, K=2, E=8, R=4)
SLOTS = dataclasses.replace(CASE, name="checkpoint_slots", expand=False)


def custom_calls(text):
    """Of a lowered program: XLA:CPU may merge the call made again with the first, being equal."""
    return collections.Counter(re.findall(r"custom_call @(jax_ep_\w+)", text))


@pytest.mark.parametrize("case", [CASE, SLOTS], ids=lambda case: case.name)
def test_alone(backend, rng, case):
    inputs, matrices = cases.make_inputs(CASE, rng), programs.random_matrices(rng, CASE)
    arguments = (inputs.x, inputs.topk_weights, matrices)
    with programs.make_buffer(CASE, backend) as buffer:
        layer = programs.linear_moe(buffer, case)
        results = {}
        for name, each in (("plain", layer), ("again", jax.checkpoint(layer))):
            run = programs.sharded(buffer, each)

            def loss(x, topk_weights, matrices, run=run):
                out = run(x, inputs.topk_idx, topk_weights, matrices)
                return jnp.sum(jnp.sin(out))

            step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
            lowered = step.lower(*arguments)
            values = jax.block_until_ready(lowered.compile()(*arguments))
            results[name] = values, custom_calls(lowered.as_text())
    for plain, again in zip(*(jax.tree.leaves(r[0]) for r in results.values()), strict=True):
        np.testing.assert_array_equal(plain, again)
    if backend == "native":
        assert results["plain"][1]["jax_ep_dispatch"] == 1
        assert results["again"][1]["jax_ep_dispatch"] == 2


@pytest.mark.parametrize(
    ("backend", "policy"),
    [
        ("reference", None),
        ("native", None),
        ("native", jax.checkpoint_policies.dots_saveable),
        ("native", jax.checkpoint_policies.everything_saveable),
    ],
    ids=["reference", "native", "native-dots_saveable", "native-everything_saveable"],
)
@pytest.mark.parametrize("case", [test_scan.CASE, test_scan.SLOTS], ids=lambda case: case.name)
def test_inside_scan(backend, policy, rng, case):
    x, topk_idx, topk_weights, matrices = test_scan.random_stack(rng)
    g = rng.normal(size=x.shape).astype(np.float32)
    expected_out, expected = test_scan.dense_stack(x, topk_idx, topk_weights, matrices, g)
    with programs.make_buffer(case, backend) as buffer:
        stack = test_scan.scanned(
            buffer, lambda layer: jax.checkpoint(layer, policy=policy), case=case
        )
        run = test_scan.value_and_gradients(stack, topk_idx, g)
        (_, out), gradients = jax.block_until_ready(run(x, topk_weights, matrices))
    np.testing.assert_allclose(out, expected_out, rtol=0, atol=1e-4)
    for seen, truth in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(seen, truth, rtol=0, atol=2e-4 * np.abs(truth).max())
