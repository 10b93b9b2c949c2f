"""``after=`` changes no result, and what it says holds in the compiled program."""

import cases
import jax
import jax.numpy as jnp
import notify_programs
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


@pytest.mark.parametrize("later", ["jax_ep_dispatch", "jax_ep_notify", "jax_ep_dispatch_routed"])
@pytest.mark.parametrize("kind", ["a Routed", "an array", "integers"])
def test_the_later_operation_depends_on_the_earlier_one(kind, later, rng):
    """With no other use of the first dispatch, it stays in the program."""
    inputs = cases.make_inputs(CASE, rng)
    with programs.make_buffer(CASE, "native") as buffer:

        def program(x, topk_idx, topk_weights, *, ordered=True):
            first = jax_ep.dispatch(buffer, 2 * x, topk_idx, topk_weights)
            picked = {"a Routed": first, "an array": first.tokens, "integers": first.group_sizes}
            after = picked[kind] if ordered else None
            if later == "jax_ep_notify":
                return jax_ep.route(buffer, topk_idx, after=after).counts
            if later == "jax_ep_dispatch":
                return jax_ep.dispatch(buffer, x, topk_idx, topk_weights, after=after).tokens
            options = {"routing": jax_ep.route(buffer, topk_idx), "after": after}
            return jax_ep.dispatch(buffer, x, topk_weights=topk_weights, **options).tokens

        def calls(ordered):
            run = programs.sharded(buffer, lambda *a: program(*a, ordered=ordered))
            arguments = (inputs.x, inputs.topk_idx, inputs.topk_weights)
            text = jax.jit(run).lower(*arguments).compile().as_text()
            return {name: text.count(f'"{name}"') for name in ("jax_ep_dispatch", later)}

        count = 2 if later == "jax_ep_dispatch" else 1
        assert calls(ordered=True) == {"jax_ep_dispatch": 1} | {later: count}
        assert calls(ordered=False) == {"jax_ep_dispatch": 0} | {later: 1}


def test_a_routing_can_be_the_earlier_one(rng):
    inputs = cases.make_inputs(CASE, rng)
    with programs.make_buffer(CASE, "native") as buffer:

        def program(x, topk_idx, topk_weights):
            routing = jax_ep.route(buffer, topk_idx)
            return jax_ep.dispatch(buffer, x, topk_idx, topk_weights, after=routing).tokens

        run = jax.jit(programs.sharded(buffer, program))
        text = run.lower(inputs.x, inputs.topk_idx, inputs.topk_weights).compile().as_text()
        assert text.count('"jax_ep_notify"') == 1


def test_a_notice_comes_after_an_earlier_program(backend, rng):
    inputs = cases.make_inputs(CASE, rng)
    with programs.make_buffer(CASE, backend) as buffer:
        run = jax.jit(programs.sharded(buffer, lambda x: 2 * x))
        (x,) = notify_programs.on_mesh(buffer, inputs.x)
        notice = jax_ep.notify_dispatch(buffer, inputs.topk_idx, after=run(x))
        sizes = notify_programs.true_sizes(inputs.topk_idx, CASE)
        np.testing.assert_array_equal(notice.recv_tokens_per_expert(), sizes)
        with pytest.raises(jax_ep.EpUsageError, match=r"result of a program over buffer\.mesh"):
            jax_ep.notify_dispatch(buffer, inputs.topk_idx, after=jnp.ones(3))


@pytest.mark.parametrize("op", ["dispatch", "route", "notify_dispatch"])
def test_an_empty_array_is_refused(op, rng):
    inputs = cases.make_inputs(CASE, rng)
    with programs.make_buffer(CASE, "native") as buffer:

        def program(x, topk_idx, topk_weights):
            if op == "route":
                return jax_ep.route(buffer, topk_idx, after=x[:0]).counts
            return jax_ep.dispatch(buffer, x, topk_idx, topk_weights, after=x[:0]).tokens

        def call():
            if op == "notify_dispatch":
                jax_ep.notify_dispatch(buffer, inputs.topk_idx, after=jnp.ones((0, 2)))
            programs.sharded(buffer, program)(inputs.x, inputs.topk_idx, inputs.topk_weights)

        with pytest.raises(jax_ep.EpUsageError, match=rf"{op}: after has shape \(0, .*no element"):
            call()


@pytest.mark.parametrize("after", [3, "first", [1.0]])
def test_what_after_cannot_be(after, rng):
    inputs = cases.make_inputs(CASE, rng)
    with programs.make_buffer(CASE, "native") as buffer:

        def program(x, topk_idx, topk_weights):
            return jax_ep.dispatch(buffer, x, topk_idx, topk_weights, after=after).tokens

        with pytest.raises(jax_ep.EpUsageError, match=r"dispatch: after=.*pass a Routed.*an array"):
            programs.sharded(buffer, program)(inputs.x, inputs.topk_idx, inputs.topk_weights)
