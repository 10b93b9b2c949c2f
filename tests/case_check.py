"""One program with every native call of a case, its inputs, and the check of its results.

Rows that hold no token are NaN in every array that goes in, so reading one shows in the results.
"""

import dataclasses

import cases
import jax
import numpy as np
import oracle
import programs

import jax_ep

# Relative to the largest term of a sum: float32 sums in another order; the others round once for
# the way and once at the end, each by half a unit in the last place.
TOLERANCE = {"float32": 2e-6, "bfloat16": 2**-7, "float16": 2**-10}


def everything(buffer, case):
    """One program with the four native calls: both operations and both gradients."""
    return jax.jit(programs.sharded(buffer, rank_program(buffer, case)))


def rank_program(buffer, case, *, in_order=False):
    """What ``everything`` does on each rank; ``in_order``: the sums of the combine channel too."""

    def program(x, topk_idx, topk_weights, d_tokens, d_weights, y, row_weights, g):
        def send(x, topk_weights):
            routed = programs.dispatch(buffer, case, x, topk_idx, topk_weights)
            return (routed.tokens, routed.weights), routed

        _, pull_dispatch, routed = jax.vjp(send, x, topk_weights, has_aux=True)
        d_x, d_topk_weights = pull_dispatch((d_tokens, d_weights))

        def bring_back(y, row_weights):
            edited = dataclasses.replace(routed, weights=row_weights)
            return jax_ep.combine(buffer, y, edited, after=d_x if in_order and case.T else None)

        out, pull_combine = jax.vjp(bring_back, y, row_weights)
        d_y, d_row_weights = pull_combine(g)
        row_map = {} if case.expand else {"row_map": routed.row_map}
        return row_map | {
            "tokens": routed.tokens,
            "weights": routed.weights,
            "group_sizes": routed.group_sizes,
            "valid_sizes": routed.valid_sizes,
            "num_dropped": routed.num_dropped[None],
            "topk_idx": routed.handle.topk_idx,
            "recv_rows": routed.handle.recv_rows,
            "out": out,
            "d_x": d_x,
            "d_topk_weights": d_topk_weights,
            "d_y": d_y,
            "d_row_weights": d_row_weights,
        }

    return program


def by_rank(array, case):
    return np.asarray(array).reshape(case.R, array.shape[0] // case.R, *array.shape[1:])


def truth_of(case, inputs):
    return oracle.dispatch(
        by_rank(inputs.x, case),
        by_rank(inputs.topk_idx, case),
        by_rank(inputs.topk_weights, case),
        num_experts=case.E,
        capacity=case.rows,
        alignment=case.alignment,
    )


def row_arrays(rng, case, truth):
    """Random d_tokens, d_weights, y and row_weights; NaN in rows and slots where no token is."""
    shape = (case.R, case.rows, case.H)
    d_tokens, y = (cases.random_rows(rng, shape, case.dtype) for _ in range(2))
    d_weights, row_weights = (rng.normal(size=shape[:2]).astype(np.float32) for _ in range(2))
    for array in (d_tokens, d_weights, y, row_weights):
        array[~truth.holds_token] = np.nan
    if not case.expand:
        d_tokens = cases.random_rows(rng, (case.R, case.R * case.T, case.H), case.dtype)
        d_tokens[(truth.recv_rows < 0).all(2)] = np.nan
    return d_tokens, d_weights, y, row_weights


def written_rows(case, truth):
    """Expert-major rows that are specified: all, or with a loose tail those of the segments."""
    written = np.arange(case.rows)[None] < truth.group_sizes.sum(1, keepdims=True)
    return written | case.zero_tail


def written_tokens(case, truth):
    """Rows of ``Routed.tokens`` that are specified: every slot, when not expanded."""
    return written_rows(case, truth) if case.expand else np.ones(truth.recv_rows.shape[:2], bool)


def assert_close(name, seen, expected, case):
    """Within the dtype's tolerance of the largest magnitude in the array."""
    scale = max(1.0, np.abs(expected).max(initial=0.0))
    tolerance = TOLERANCE[case.dtype] * scale * (case.K + case.R) ** 0.5
    np.testing.assert_allclose(
        seen.astype(np.float64), expected, rtol=0, atol=tolerance, err_msg=name
    )


@dataclasses.dataclass(frozen=True)
class Problem:
    """Inputs of ``everything`` by rank, and what dispatch must make of them."""

    inputs: cases.Inputs
    truth: oracle.Dispatched
    d_tokens: np.ndarray
    d_weights: np.ndarray
    y: np.ndarray
    row_weights: np.ndarray
    g: np.ndarray

    @property
    def num_faults(self) -> int:
        return self.truth.num_out_of_range + self.truth.num_duplicates

    def arguments(self) -> list[np.ndarray]:
        """Arguments of ``everything``, all ranks' stacked."""
        by_rank = (self.d_tokens, self.d_weights, self.y, self.row_weights, self.g)
        flat = [a.reshape(a.shape[0] * a.shape[1], *a.shape[2:]) for a in by_rank]
        return [self.inputs.x, self.inputs.topk_idx, self.inputs.topk_weights, *flat]


def make_problem(case, rng) -> Problem:
    inputs = cases.make_inputs(case, rng)
    truth = truth_of(case, inputs)
    rows = row_arrays(rng, case, truth)
    g = cases.random_rows(rng, (case.R, case.T, case.H), case.dtype)
    return Problem(inputs, truth, *rows, g)


def check_against_oracle(case, problem: Problem, results) -> None:
    """Compares the results of ``everything`` with the oracle's."""
    truth = problem.truth
    got = {name: by_rank(array, case) for name, array in results.items()}
    for name in ("group_sizes", "valid_sizes", "topk_idx", "recv_rows"):
        expected = getattr(truth, name)
        np.testing.assert_array_equal(got[name].reshape(expected.shape), expected, err_msg=name)
    np.testing.assert_array_equal(got["num_dropped"][:, 0], truth.num_dropped)
    np.testing.assert_array_equal(got["weights"], truth.weights)
    expected_tokens = truth.tokens
    if not case.expand:
        expected_tokens, row_map = oracle.slots(truth, by_rank(problem.inputs.x, case))
        np.testing.assert_array_equal(got["row_map"], row_map, err_msg="row_map")
    written = written_tokens(case, truth)
    np.testing.assert_array_equal(
        got["tokens"][written].astype(np.float64), expected_tokens[written], err_msg="tokens"
    )

    assert_close("out", got["out"], oracle.combine(truth, problem.y, problem.row_weights), case)
    gradients_of = oracle.dispatch_gradients if case.expand else oracle.slot_gradients
    d_x, d_topk_weights = gradients_of(truth, problem.d_tokens, problem.d_weights)
    assert_close("d_x", got["d_x"], d_x, case)
    np.testing.assert_array_equal(
        got["d_topk_weights"].reshape(d_topk_weights.shape), d_topk_weights
    )
    d_y, d_row_weights = oracle.combine_gradients(truth, problem.y, problem.row_weights, problem.g)
    written = written_rows(case, truth)
    assert_close("d_y", got["d_y"][written], d_y[written], case)
    seen, scale = got["d_row_weights"], np.sqrt(case.H)
    np.testing.assert_allclose(seen, d_row_weights, rtol=1e-5, atol=1e-5 * scale)
