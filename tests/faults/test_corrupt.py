"""Indices that are garbage: no address outside the arrays, and results as the rules define them.

Rows hold small integers, so that every sum is exact in any order and can be compared with ``==``.
Nothing here needs test hooks: the same holds for a release build.
"""

import dataclasses
import re

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import programs
import pytest
from fault_programs import compiled, failure, sharded_routed

import jax_ep
from jax_ep import _primitives

INT_MIN, INT_MAX = -(2**31), 2**31 - 1


def small_case(num_ranks, expand=True):
    return cases.Case(name="corrupt", T=11, H=16, K=4, E=24, R=num_ranks, chunk=4, expand=expand)


def integers(rng, *shape):
    return rng.integers(-8, 9, shape).astype(np.float32)


def garbage(rng, shape, most):
    """Int32 around [0, most), a quarter of it far outside."""
    near = rng.integers(-3, most + 3, shape)
    far = rng.choice([INT_MIN, INT_MIN + 1, -2, most, most + 1, 2**30, INT_MAX - 1, INT_MAX], shape)
    return np.where(rng.random(shape) < 0.25, far, near).astype(np.int32)


@pytest.mark.parametrize(
    ("num_ranks", "expand"), [(1, True), (2, True), (4, True), (8, True), (1, False), (4, False)]
)
def test_corrupt_topk_idx(rng, num_ranks, expand, backend):
    """Treated as -1, counted, reported once; everything else as if they had been -1."""
    case = small_case(num_ranks, expand)
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
    slots, row_map = oracle.slots(truth, x.reshape(*shape, case.H))
    with programs.make_buffer(case, backend) as buffer:
        run = compiled(buffer, lambda *shards: sharded_routed(buffer, case, *shards))
        routed = jax.block_until_ready(run(x, topk_idx, weights))
        rows = [(routed.tokens, slots), (routed.row_map, row_map)]
        for seen, expected in (
            *([(routed.tokens, truth.tokens)] if expand else rows),
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


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_corrupt_handles_of_slots(rng, num_ranks):
    """The gradient of an unexpanded dispatch, given a handle that no dispatch made."""
    case = small_case(num_ranks, expand=False)
    d_slots = integers(rng, case.R, case.R * case.T, case.H)
    d_weights = integers(rng, case.R, case.rows)
    topk_idx = garbage(rng, (case.R, case.T, case.K), case.E)
    recv_rows = garbage(rng, (case.R, case.R * case.T, case.K), case.rows)
    recv_rows[rng.random(recv_rows.shape[:2]) < 0.3] = -1

    def program(x, idx, *corrupt):
        routed = programs.dispatch(buffer, case, x, idx, jnp.ones(idx.shape, jnp.float32))
        return _primitives.combine_with_scalars(routed.handle.layout, *corrupt)

    inputs = cases.make_inputs(case, rng)
    flat = [a.reshape(-1, *a.shape[2:]) for a in (d_slots, d_weights, topk_idx, recv_rows)]
    with programs.make_buffer(case, "native") as buffer:
        run = compiled(buffer, program)
        results = jax.block_until_ready(run(inputs.x, inputs.topk_idx, *flat))
        d_x, scalars = (gathered(case, array) for array in results)
        assert buffer.check() is None

    right_x, right_scalars = np.zeros(d_x.shape), np.zeros(scalars.shape)
    for rank, token in np.ndindex(case.R, case.T):
        owners = [owner(case, int(expert)) for expert in topk_idx[rank, token]]
        slot = rank * case.T + token
        for peer in set(owners) - {-1}:
            if any(0 <= row < case.rows for row in recv_rows[peer, slot]):
                right_x[rank, token] += d_slots[peer, slot]
        for k, peer in enumerate(owners):
            row = recv_rows[peer, slot, k]
            if peer >= 0 and 0 <= row < case.rows:
                right_scalars[rank, token, k] = d_weights[peer, row]
    assert right_x.any()
    assert right_scalars.any()
    np.testing.assert_array_equal(d_x, right_x)
    np.testing.assert_array_equal(scalars, right_scalars)


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


@pytest.mark.parametrize(
    ("num_rows", "with_scalars", "weighted", "message"),
    [
        (44, False, True, "combine: expected scalars and no weights for a y of slots"),
        (44, True, True, "combine: expected scalars and no weights for a y of slots"),
        (40, True, False, r"combine: y has .* shape \[ 40 16 \], expected .* shape \[ 44 16 \]"),
    ],
)
def test_native_checks_of_slots(rng, num_rows, with_scalars, weighted, message):
    """What Python never asks for is refused before native code touches memory."""
    case = small_case(4, expand=False)
    inputs = cases.make_inputs(case, rng)
    with programs.make_buffer(case, "native") as buffer:

        def program(x, topk_idx, topk_weights):
            routed = programs.dispatch(buffer, case, x, topk_idx, topk_weights)
            given, none = routed.weights, routed.weights[:0]
            out, _ = _primitives._combine(
                routed.handle.layout,
                routed.tokens[:num_rows],
                given if weighted else none,
                given if with_scalars else none,
                routed.handle.topk_idx,
                routed.handle.recv_rows,
                expanded=False,
            )
            return out

        run = compiled(buffer, program)
        text, _ = failure(lambda: run(inputs.x, inputs.topk_idx, inputs.topk_weights))
    assert re.search(f"EpUsageError: {message}", text)
