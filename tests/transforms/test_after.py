"""``after=`` changes no result, and what it says holds in the compiled program."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

import jax_ep

CASE = cases.Case(name="after", T=11, H=16, K=2, E=8, R=4)


def losses(buffer, ordered):
    """Two independent dispatches and combines; value and gradients."""

    def loss(x, topk_weights, topk_idx):
        out, previous = 0.0, None
        for scale in (1, 2):
            first = jax_ep.dispatch(buffer, scale * x, topk_idx, topk_weights, after=previous)
            after = first if ordered else None
            y = jax_ep.combine(buffer, jnp.sin(first.tokens), first, after=after)
            out, previous = out + jnp.sum(y**3), y if ordered else None
        return out

    def program(x, topk_idx, topk_weights):
        value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(x, topk_weights, topk_idx)
        return value[None], gradients

    return jax.jit(programs.sharded(buffer, program))


def test_results_and_gradients_keep_their_bits(backend, rng):
    inputs = cases.make_inputs(CASE, rng)
    with programs.make_buffer(CASE, backend) as buffer:
        results = [
            jax.tree.leaves(losses(buffer, ordered)(inputs.x, inputs.topk_idx, inputs.topk_weights))
            for ordered in (False, True)
        ]
    for free, held in zip(*results, strict=True):
        np.testing.assert_array_equal(np.asarray(free), np.asarray(held))


@pytest.mark.parametrize("kind", ["a Routed", "an array", "integers"])
def test_the_later_operation_depends_on_the_earlier_one(kind, rng):
    """With no other use of the first dispatch, it stays in the program."""
    inputs = cases.make_inputs(CASE, rng)
    with programs.make_buffer(CASE, "native") as buffer:

        def program(x, topk_idx, topk_weights, *, ordered=True):
            first = jax_ep.dispatch(buffer, 2 * x, topk_idx, topk_weights)
            picked = {"a Routed": first, "an array": first.tokens, "integers": first.group_sizes}
            after = picked[kind] if ordered else None
            return jax_ep.dispatch(buffer, x, topk_idx, topk_weights, after=after).tokens

        def calls(ordered):
            run = programs.sharded(buffer, lambda *a: program(*a, ordered=ordered))
            arguments = (inputs.x, inputs.topk_idx, inputs.topk_weights)
            return jax.jit(run).lower(*arguments).compile().as_text().count('"jax_ep_dispatch"')

        assert calls(ordered=True) == 2
        assert calls(ordered=False) == 1


@pytest.mark.parametrize("after", [3, "first", [1.0]])
def test_what_after_cannot_be(after, rng):
    inputs = cases.make_inputs(CASE, rng)
    with programs.make_buffer(CASE, "native") as buffer:

        def program(x, topk_idx, topk_weights):
            return jax_ep.dispatch(buffer, x, topk_idx, topk_weights, after=after).tokens

        with pytest.raises(
            jax_ep.EpUsageError, match=r"dispatch: after=.*pass a Routed.*or an arr"
        ):
            programs.sharded(buffer, program)(inputs.x, inputs.topk_idx, inputs.topk_weights)
