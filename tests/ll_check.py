"""Low-latency programs of a case, their inputs, and the check of their results.

As ``case_check`` for the other mode: rows that hold no token are NaN in every array that goes in.
"""

import dataclasses
import functools

import case_check
import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import programs

import jax_ep

LAYOUTS = ("padded", "compact")
TINY = cases.Case(name="tiny", T=6, H=16, K=3, E=8, R=4)


def make_buffer(case: cases.Case, backend: str, **changes) -> jax_ep.Buffer:
    return programs.make_buffer(case, backend, mode="low_latency", **changes)


def dispatch(buffer, case, layout, *arrays, **options) -> jax_ep.LowLatencyRouted:
    """The fused dispatch with the case's options."""
    capacity = case.capacity if layout == "compact" else None
    return jax_ep.low_latency_dispatch(buffer, *arrays, layout=layout, capacity=capacity, **options)


def split_dispatch(buffer, case, layout, *arrays, **options) -> jax_ep.LowLatencyRouted:
    """The same in two halves."""
    capacity = case.capacity if layout == "compact" else None
    pending = jax_ep.low_latency_dispatch_start(buffer, *arrays, layout=layout, capacity=capacity)
    return jax_ep.low_latency_dispatch_done(buffer, pending, **options)


def split_combine(buffer, y, routed):
    return jax_ep.low_latency_combine_done(
        buffer, jax_ep.low_latency_combine_start(buffer, y, routed)
    )


def linear_moe(buffer, case, layout, wrap_rows=lambda rows: rows):
    """``f(x, topk_idx, topk_weights, matrices)``, linear experts of matrices ``[E_l, H, H]``."""

    def layer(x, topk_idx, topk_weights, matrices):
        routed = dispatch(buffer, case, layout, x, topk_idx, topk_weights)
        tokens = wrap_rows(routed.tokens)
        if layout == "compact":
            y = jax.lax.ragged_dot(tokens, matrices, routed.counts)
        else:
            held = jnp.arange(tokens.shape[1]) < routed.counts[:, None]
            y = jnp.einsum("erh,ehf->erf", jnp.where(held[..., None], tokens, 0), matrices)
        return jax_ep.low_latency_combine(buffer, y.astype(x.dtype), routed)

    return layer


def visible(routed: jax_ep.LowLatencyRouted) -> dict:
    """What leaves shard_map, every array with an axis that the mesh's splits."""
    rows = routed.handle.layout.capacity
    return {
        "tokens": routed.tokens.reshape(rows, routed.tokens.shape[-1]),
        "weights": routed.weights.reshape(rows),
        "counts": routed.counts,
        "num_dropped": routed.num_dropped[None],
        "topk_idx": routed.handle.topk_idx,
        "recv_rows": routed.handle.recv_rows,
    }


def everything(buffer, case, layout):
    """Both fused operations and both gradients."""

    def program(ballast, x, topk_idx, topk_weights, d_tokens, d_weights, y, row_weights, g):
        def send(x, topk_weights):
            routed = dispatch(buffer, case, layout, x, topk_idx, topk_weights)
            return (routed.tokens, routed.weights), routed

        (tokens, weights), pull_dispatch, routed = jax.vjp(send, x, topk_weights, has_aux=True)
        cotangents = d_tokens.reshape(tokens.shape), d_weights.reshape(weights.shape)
        d_x, d_topk_weights = pull_dispatch(cotangents)

        def bring_back(y, row_weights):
            edited = dataclasses.replace(routed, weights=row_weights.reshape(weights.shape))
            return jax_ep.low_latency_combine(buffer, y.reshape(tokens.shape), edited)

        out, pull_combine = jax.vjp(bring_back, y, row_weights)
        d_y, d_row_weights = pull_combine(g)
        gradients = {
            "d_x": d_x,
            "d_topk_weights": d_topk_weights,
            "d_y": d_y,
            "d_row_weights": d_row_weights,
        }
        return visible(routed) | {"out": out, "ballast": ballast} | gradients

    return _compiled(buffer, case, program)


def in_halves(buffer, case, layout):
    """Both operations in halves, arguments as for ``everything``."""

    def program(ballast, x, topk_idx, topk_weights, d_tokens, d_weights, y, row_weights, g):
        routed = split_dispatch(buffer, case, layout, x, topk_idx, topk_weights)
        edited = dataclasses.replace(routed, weights=row_weights.reshape(routed.weights.shape))
        out = split_combine(buffer, y.reshape(routed.tokens.shape), edited)
        return visible(routed) | {"out": out, "ballast": ballast}

    return _compiled(buffer, case, program)


def _compiled(buffer, case, program):
    """XLA takes no sharded program all of whose operands are empty, as those of T = 0 are."""
    ballast = np.zeros(case.R, np.float32)
    return functools.partial(jax.jit(programs.sharded(buffer, program)), ballast)


def truth_of(case, inputs, layout) -> oracle.Dispatched:
    """What dispatch must make of the inputs; padded row numbers count from block to block."""
    truth = case_check.truth_of(case, inputs)
    if layout == "compact":
        return truth
    block = case.R * case.T
    rows = case.experts_per_rank * block
    ends = np.cumsum(truth.group_sizes, axis=1)
    tokens = np.zeros((case.R, rows, case.H))
    weights = np.zeros((case.R, rows))
    holds_token = np.zeros((case.R, rows), bool)
    recv_rows = np.full_like(truth.recv_rows, -1)
    for rank, row, source, token, k in truth.entries():
        expert = int(np.searchsorted(ends[rank], row, side="right"))
        start = ends[rank, expert] - truth.group_sizes[rank, expert]
        to = expert * block + row - start
        tokens[rank, to], weights[rank, to] = truth.tokens[rank, row], truth.weights[rank, row]
        holds_token[rank, to] = True
        recv_rows[rank, source * case.T + token, k] = to
    return dataclasses.replace(
        truth, tokens=tokens, weights=weights, holds_token=holds_token, recv_rows=recv_rows
    )


def make_problem(case, layout, rng) -> case_check.Problem:
    inputs = cases.make_inputs(case, rng)
    truth = truth_of(case, inputs, layout)
    shape = truth.tokens.shape
    d_tokens, y = (cases.random_rows(rng, shape, case.dtype) for _ in range(2))
    d_weights, row_weights = (rng.normal(size=shape[:2]).astype(np.float32) for _ in range(2))
    for array in (d_tokens, d_weights, y, row_weights):
        array[~truth.holds_token] = np.nan
    g = cases.random_rows(rng, (case.R, case.T, case.H), case.dtype)
    return case_check.Problem(inputs, truth, d_tokens, d_weights, y, row_weights, g)


def check_against_oracle(case, problem: case_check.Problem, results) -> None:
    """Compares the results of ``everything`` or ``in_halves`` with the oracle's."""
    truth = problem.truth
    got = {name: case_check.by_rank(array, case) for name, array in results.items()}
    np.testing.assert_array_equal(got["counts"], truth.group_sizes)
    for name in ("topk_idx", "recv_rows"):
        expected = getattr(truth, name)
        np.testing.assert_array_equal(got[name].reshape(expected.shape), expected, err_msg=name)
    np.testing.assert_array_equal(got["num_dropped"][:, 0], truth.num_dropped)
    np.testing.assert_array_equal(got["weights"], truth.weights)
    held = truth.holds_token
    np.testing.assert_array_equal(
        got["tokens"][held].astype(np.float64), truth.tokens[held], err_msg="tokens"
    )
    out = oracle.combine(truth, problem.y, problem.row_weights)
    case_check.assert_close("out", got["out"], out, case)
    if "d_x" not in got:
        return
    d_x, d_topk_weights = oracle.dispatch_gradients(truth, problem.d_tokens, problem.d_weights)
    case_check.assert_close("d_x", got["d_x"], d_x, case)
    np.testing.assert_array_equal(
        got["d_topk_weights"].reshape(d_topk_weights.shape), d_topk_weights
    )
    d_y, d_row_weights = oracle.combine_gradients(truth, problem.y, problem.row_weights, problem.g)
    case_check.assert_close("d_y", got["d_y"], d_y, case)
    scale = np.sqrt(case.H)
    np.testing.assert_allclose(got["d_row_weights"], d_row_weights, rtol=1e-5, atol=1e-5 * scale)
