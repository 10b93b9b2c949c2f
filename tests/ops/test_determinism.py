"""Same inputs, same bits: run to run, program to program, whatever the neighbours hold."""

import dataclasses

import cases
import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest

import jax_ep

RUNS = [
    ("reference", "four_ranks_bf16"),
    ("native", "four_ranks_bf16"),
    ("native", "chunked"),
    ("native", "drops_aligned"),
    ("native", "many_k"),
    ("native", "slots_drops"),
    ("window", "four_ranks_bf16"),
    ("window", "chunked"),
]


def round_trip(buffer, case, *, delayed=False):
    """Gives all outputs; ``delayed`` computes something long before, which changes the timing."""

    def program(x, topk_idx, topk_weights):
        if delayed:
            rank = jax.lax.axis_index("expert")
            grown = jax.lax.fori_loop(0, 2_000 * (rank + 1), lambda _, v: jnp.cos(v), x[:1, :1])
            x = jnp.where(grown[0, 0] > 2, x + 1, x)  # cos never exceeds 1
        routed = programs.dispatch(buffer, case, x, topk_idx, topk_weights)
        y = programs.expert_rows(routed) * jnp.asarray(1.3, x.dtype)
        given = dataclasses.replace(routed, num_dropped=routed.num_dropped[None])
        return given, jax_ep.combine(buffer, y, routed)

    return jax.jit(programs.sharded(buffer, program))


def bits(results):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(results)]


@pytest.mark.parametrize(("backend", "name"), RUNS)
def test_runs_and_programs_agree_in_every_bit(backend, rng, name):
    case = cases.BY_NAME[name]
    inputs = cases.make_inputs(case, rng)
    arguments = (inputs.x, inputs.topk_idx, inputs.topk_weights)
    with (
        programs.make_buffer(case, backend) as buffer,
        programs.make_buffer(case, backend) as other,
    ):
        first = round_trip(buffer, case)
        expected = bits(first(*arguments))
        assert all(bits(first(*arguments)) == expected for _ in range(5))
        assert bits(round_trip(buffer, case, delayed=True)(*arguments)) == expected
        assert bits(round_trip(other, case)(*arguments)) == expected


@pytest.mark.parametrize(("backend", "name"), RUNS[:3])
def test_neighbours_do_not_matter(backend, rng, name):
    """With every other token's numbers changed, a token's own result keeps its bits."""
    case = cases.BY_NAME[name]
    inputs, others = cases.make_inputs(case, rng), cases.make_inputs(case, rng)
    mine = rng.random(case.R * case.T) < 0.3
    mixed = dataclasses.replace(
        others,
        x=np.where(mine[:, None], inputs.x, others.x),
        topk_idx=np.where(mine[:, None], inputs.topk_idx, others.topk_idx),
        topk_weights=np.where(mine[:, None], inputs.topk_weights, others.topk_weights),
    )
    with programs.make_buffer(case, backend) as buffer:
        run = round_trip(buffer, case)
        outs = [
            np.asarray(run(each.x, each.topk_idx, each.topk_weights)[-1])
            for each in (inputs, mixed)
        ]
    assert outs[0][mine].tobytes() == outs[1][mine].tobytes()
    assert outs[0].tobytes() != outs[1].tobytes()


@pytest.mark.parametrize("name", ["two_ranks", "some_nobody", "slots_many_k"])
def test_chunks_do_not_matter(rng, name):
    """How many tokens an epoch carries is invisible in the results."""
    case = cases.BY_NAME[name]
    inputs = cases.make_inputs(case, rng)
    results = []
    for chunk in (None, 1, 4, 16):
        chunked = dataclasses.replace(case, chunk=chunk)
        with programs.make_buffer(chunked, "native") as buffer:
            run = round_trip(buffer, chunked)
            tree = run(inputs.x, inputs.topk_idx, inputs.topk_weights)
            results.append(bits(tree))
    assert all(result == results[0] for result in results)


# Weights of rows of ones, of the token's own rank and of the others, ascending; and their sum in
# the promised order, in which 2^24 + 1 is 2^24. Own rows in rank order or last would make another
# sum of the first on the last rank, others descending of the second.
BIG = 2.0**24
SUMS = [((-BIG, BIG, 1, 0), 1), ((0, BIG, 1, -BIG), 0)]


@pytest.mark.parametrize("backend", ["reference", "native", "window"])
@pytest.mark.parametrize(("weights", "total"), SUMS)
def test_own_rows_are_added_first_and_the_others_in_rank_order(backend, weights, total):
    case = cases.Case(name="order", T=3, H=16, K=4, E=4, R=4)
    owners = [[rank, *(other for other in range(4) if other != rank)] for rank in range(4)]
    topk_idx = np.repeat(np.asarray(owners, np.int32), case.T, axis=0)
    shape = (case.R * case.T, case.H)
    arguments = (
        np.ones(shape, np.float32),
        topk_idx,
        np.tile(np.asarray(weights, np.float32), (len(topk_idx), 1)),
    )
    with programs.make_buffer(case, backend) as buffer:

        def program(x, topk_idx, topk_weights):
            routed = programs.dispatch(buffer, case, x, topk_idx, topk_weights)
            return jax_ep.combine(buffer, routed.tokens, routed)

        out = jax.jit(programs.sharded(buffer, program))(*arguments)
    np.testing.assert_array_equal(np.asarray(out), np.full(shape, total, np.float32))
