"""Indices that are garbage: no address outside the arrays, and results as the rules define them.

Rows hold small integers, so that every sum is exact in any order and can be compared with ``==``.
Nothing here needs test hooks: the same holds for a release build.
"""

import dataclasses

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import programs
import pytest
from fault_programs import compiled, sharded_routed

import jax_ep

INT_MIN, INT_MAX = -(2**31), 2**31 - 1


def small_case(num_ranks):
    return cases.Case(name="corrupt", T=11, H=16, K=4, E=24, R=num_ranks, chunk=4)


def integers(rng, *shape):
    return rng.integers(-8, 9, shape).astype(np.float32)


def garbage(rng, shape, most):
    """Int32 around [0, most), a quarter of it far outside."""
    near = rng.integers(-3, most + 3, shape)
    far = rng.choice([INT_MIN, INT_MIN + 1, -2, most, most + 1, 2**30, INT_MAX - 1, INT_MAX], shape)
    return np.where(rng.random(shape) < 0.25, far, near).astype(np.int32)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_corrupt_topk_idx(rng, num_ranks, backend):
    """Treated as -1, counted, reported once; everything else as if they had been -1."""
    case = small_case(num_ranks)
    x = integers(rng, case.R * case.T, case.H)
    weights = integers(rng, case.R * case.T, case.K)
    topk_idx = garbage(rng, (case.R * case.T, case.K), case.E)
    shape = (case.R, case.T)
    truth = oracle.dispatch(
        x.reshape(*shape, case.H),
        topk_idx.reshape(*shape, case.K),
        weights.reshape(*shape, case.K),
        num_experts=case.E,
        capacity=case.rows,
    )
    with programs.make_buffer(case, backend) as buffer:
        run = compiled(buffer, lambda *shards: sharded_routed(buffer, case, *shards))
        routed = jax.block_until_ready(run(x, topk_idx, weights))
        for seen, expected in (
            (routed.tokens, truth.tokens),
            (routed.weights, truth.weights),
            (routed.group_sizes, truth.group_sizes),
            (routed.valid_sizes, truth.valid_sizes),
            (routed.num_dropped, truth.num_dropped),
            (routed.handle.topk_idx, truth.topk_idx),
            (routed.handle.recv_rows, truth.recv_rows),
        ):
            np.testing.assert_array_equal(np.asarray(seen).reshape(expected.shape), expected)
        if backend == "reference":
            return
        with pytest.raises(jax_ep.EpDataError) as raised:
            buffer.check()
        error = raised.value
        assert error.count == truth.num_out_of_range + truth.num_duplicates
        faulty = (topk_idx.reshape(truth.topk_idx.shape) != -1) & (truth.topk_idx == -1)
        assert (error.rank, error.token, error.k) == tuple(np.argwhere(faulty)[0])
        assert (
            error.value == topk_idx.reshape(truth.topk_idx.shape)[error.rank, error.token, error.k]
        )
        assert buffer.check() is None, "a data fault is told once"


def gathered(case, array):
    return np.asarray(array).reshape(case.R, -1, *array.shape[1:])


def owner(case, expert):
    """The rank that holds an expert; -1 for what is no expert."""
    return expert // case.experts_per_rank if 0 <= expert < case.E else -1


def expected_combine(case, y, weights, topk_idx, recv_rows):
    """By the words: of each rank that a token names, the rows that the rank's handle has for it."""
    out = np.zeros((case.R, case.T, case.H))
    for rank, token in np.ndindex(case.R, case.T):
        for peer in {owner(case, int(expert)) for expert in topk_idx[rank, token]} - {-1}:
            for row in recv_rows[peer, rank * case.T + token]:
                if 0 <= row < case.rows:
                    out[rank, token] += weights[peer, row] * y[peer, row]
    return out


def expected_gradients(case, y, weights, topk_idx, recv_rows, g):
    """Of rows that one (source, token, k) names; NaN for rows named twice: either name may win."""
    d_y, d_weights = np.zeros(y.shape), np.zeros(weights.shape)
    times = np.zeros(weights.shape, int)
    for rank, slot in np.ndindex(case.R, case.R * case.T):
        source, token = divmod(slot, case.T)
        named = {owner(case, int(expert)) for expert in topk_idx[source, token]} | {source}
        for row in recv_rows[rank, slot] if rank in named else ():
            if 0 <= row < case.rows:
                times[rank, row] += 1
                d_y[rank, row] = weights[rank, row] * g[source, token]
                d_weights[rank, row] = y[rank, row] @ g[source, token]
    d_y[times > 1] = d_weights[times > 1] = np.nan
    return d_y, d_weights


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_corrupt_handles(rng, num_ranks, payload):
    """A handle is data that a program may have touched: nothing outside the arrays is read."""
    case = small_case(num_ranks)
    y, weights = integers(rng, case.R, case.rows, case.H), integers(rng, case.R, case.rows)
    g = integers(rng, case.R, case.T, case.H)
    topk_idx = garbage(rng, (case.R, case.T, case.K), case.E)
    recv_rows = garbage(rng, (case.R, case.R * case.T, case.K), case.rows)

    def program(x, idx, y, weights, topk_idx, recv_rows, g):
        routed = programs.dispatch(buffer, case, x, idx, jnp.ones(idx.shape, jnp.float32))
        handle = dataclasses.replace(routed.handle, topk_idx=topk_idx, recv_rows=recv_rows)

        def bring_back(y, weights):
            bad = dataclasses.replace(routed, weights=weights, handle=handle)
            return jax_ep.combine(buffer, y, bad)

        out, pull = jax.vjp(bring_back, y, weights)
        return out, *pull(g)

    inputs = cases.make_inputs(case, rng)
    flat = [a.reshape(-1, *a.shape[2:]) for a in (y, weights, topk_idx, recv_rows, g)]
    with programs.make_buffer(case, payload) as buffer:
        run = compiled(buffer, program)
        first = jax.block_until_ready(run(inputs.x, inputs.topk_idx, *flat))
        again = run(inputs.x, inputs.topk_idx, *flat)
        for a, b in zip(first, again, strict=True):
            np.testing.assert_array_equal(a, b, err_msg="results depend on timing")
        out, d_y, d_weights = (gathered(case, array) for array in first)
        np.testing.assert_array_equal(out, expected_combine(case, y, weights, topk_idx, recv_rows))
        right_y, right_weights = expected_gradients(case, y, weights, topk_idx, recv_rows, g)
        once = ~np.isnan(right_weights)
        assert once.sum() > case.R, "the draw left nothing to compare"
        np.testing.assert_array_equal(d_y[once], right_y[once])
        np.testing.assert_array_equal(d_weights[once], right_weights[once])
        assert np.isfinite(d_y).all()
        assert np.isfinite(d_weights).all()
        assert buffer.check() is None


def test_all_entries_far_outside(rng, backend):
    """Nobody is sent anything, everything is reported, and combine gives zeros."""
    case = small_case(4)
    x = integers(rng, case.R * case.T, case.H)
    topk_idx = rng.choice([INT_MIN, INT_MAX, case.E], (case.R * case.T, case.K)).astype(np.int32)
    with programs.make_buffer(case, backend) as buffer:

        def program(x, topk_idx):
            routed = programs.dispatch(
                buffer, case, x, topk_idx, jnp.ones(topk_idx.shape, jnp.float32)
            )
            return jax_ep.combine(buffer, routed.tokens + 1, routed), routed.group_sizes

        out, group_sizes = compiled(buffer, program)(x, topk_idx)
        assert not np.asarray(out).any()
        assert not np.asarray(group_sizes).any()
        if backend == "native":
            with pytest.raises(jax_ep.EpDataError, match=f"{topk_idx.size} entries"):
                buffer.check()
