"""The truth, in numpy and float64, seen from above: all ranks' inputs in, all ranks' outputs out.

Written from the words of the specification alone; it shares no code and no method with either
backend: rows are put down one by one in loops, and gradients are those of the dense formula
``out[t] = sum_k w[t, k] * f(x[t])``.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Dispatched:
    """Results of dispatch on all ranks, and where they came from.

    Attributes:
        tokens: float64 ``[R, capacity, H]``.
        weights: float64 ``[R, capacity]``.
        group_sizes, valid_sizes: ``[R, E_l]``.
        num_dropped: ``[R]``.
        topk_idx: ``[R, T, K]``, faulty entries replaced by -1.
        recv_rows: ``[R, R * T, K]``.
        holds_token: bool ``[R, capacity]``.
        num_out_of_range, num_duplicates: faulty entries met.
    """

    tokens: np.ndarray
    weights: np.ndarray
    group_sizes: np.ndarray
    valid_sizes: np.ndarray
    num_dropped: np.ndarray
    topk_idx: np.ndarray
    recv_rows: np.ndarray
    holds_token: np.ndarray
    num_out_of_range: int
    num_duplicates: int

    def entries(self):
        """Yields (rank, row, source, token, k) of every row that holds a token."""
        num_tokens = self.topk_idx.shape[1]
        for rank, position, k in np.argwhere(self.recv_rows >= 0):
            source, token = divmod(position, num_tokens)
            yield rank, self.recv_rows[rank, position, k], source, token, k


def dispatch(x, topk_idx, topk_weights, *, num_experts, capacity, alignment=1) -> Dispatched:
    """Puts every entry into its row, expert by expert.

    Args:
        x: ``[R, T, H]``.
        topk_idx: ``[R, T, K]``.
        topk_weights: ``[R, T, K]``.
        num_experts: E.
        capacity: rows on each rank.
        alignment: rows to whose multiple a segment is filled up.
    """
    num_ranks, num_tokens, num_experts_per_tok = topk_idx.shape
    experts_per_rank = num_experts // num_ranks
    clean_idx, out_of_range, duplicates = clean(topk_idx, num_experts)
    tokens = np.zeros((num_ranks, capacity, x.shape[2]))
    weights = np.zeros((num_ranks, capacity))
    holds_token = np.zeros((num_ranks, capacity), bool)
    recv_rows = np.full((num_ranks, num_ranks * num_tokens, num_experts_per_tok), -1)
    group_sizes = np.zeros((num_ranks, experts_per_rank), int)
    valid_sizes = np.zeros((num_ranks, experts_per_rank), int)
    num_dropped = np.zeros(num_ranks, int)

    members = {expert: [] for expert in range(num_experts)}
    for source, token, k in np.ndindex(clean_idx.shape):
        if clean_idx[source, token, k] >= 0:
            members[clean_idx[source, token, k]].append((source, token, k))
    for rank in range(num_ranks):
        next_row = 0
        for local in range(experts_per_rank):
            first_row = next_row
            for source, token, k in members[rank * experts_per_rank + local]:
                if next_row < capacity:
                    tokens[rank, next_row] = x[source, token]
                    weights[rank, next_row] = topk_weights[source, token, k]
                    holds_token[rank, next_row] = True
                    recv_rows[rank, source * num_tokens + token, k] = next_row
                    valid_sizes[rank, local] += 1
                else:
                    num_dropped[rank] += 1
                next_row += 1
            while (next_row - first_row) % alignment:
                next_row += 1
            group_sizes[rank, local] = min(next_row, capacity) - min(first_row, capacity)
    return Dispatched(
        tokens=tokens,
        weights=weights,
        group_sizes=group_sizes,
        valid_sizes=valid_sizes,
        num_dropped=num_dropped,
        topk_idx=clean_idx,
        recv_rows=recv_rows,
        holds_token=holds_token,
        num_out_of_range=out_of_range,
        num_duplicates=duplicates,
    )


def clean(topk_idx, num_experts):
    """Returns topk_idx with -1 for faulty entries, and how many were out of range, duplicate."""
    cleaned = np.array(topk_idx, dtype=np.int64)
    out_of_range = duplicates = 0
    for source, token in np.ndindex(cleaned.shape[:2]):
        seen = set()
        for k, expert in enumerate(cleaned[source, token].tolist()):
            if not -1 <= expert < num_experts:
                out_of_range += 1
                cleaned[source, token, k] = -1
            elif expert in seen:
                duplicates += 1
                cleaned[source, token, k] = -1
            elif expert >= 0:
                seen.add(expert)
    return cleaned, out_of_range, duplicates


def slots(dispatched: Dispatched, x):
    """What dispatch gives without expansion for x ``[R, T, H]``: tokens and row_map.

    Returns:
        float64 ``[R, R * T, H]``, zero where no row of the token is on the rank, and ``[R,
        capacity]``, R * T for rows that hold no token.
    """
    num_ranks, num_tokens, hidden = x.shape
    tokens = np.zeros((num_ranks, num_ranks * num_tokens, hidden))
    row_map = np.full(dispatched.weights.shape, num_ranks * num_tokens)
    for rank, row, source, token, _ in dispatched.entries():
        tokens[rank, source * num_tokens + token] = x[source, token]
        row_map[rank, row] = source * num_tokens + token
    return tokens, row_map


def combine(dispatched: Dispatched, y, weights) -> np.ndarray:
    """Sums of weighted rows ``[R, T, H]`` for y ``[R, capacity, H]``, weights ``[R, capacity]``."""
    num_ranks, num_tokens, _ = dispatched.topk_idx.shape
    out = np.zeros((num_ranks, num_tokens, y.shape[2]))
    for rank, row, source, token, _ in dispatched.entries():
        out[source, token] += np.float64(weights[rank, row]) * y[rank, row].astype(np.float64)
    return out


def dispatch_gradients(dispatched: Dispatched, d_tokens, d_weights):
    """Cotangents of x ``[R, T, H]`` and topk_weights from those of tokens and weights."""
    num_ranks, num_tokens, _ = dispatched.topk_idx.shape
    d_x = np.zeros((num_ranks, num_tokens, d_tokens.shape[2]))
    d_topk_weights = np.zeros(dispatched.topk_idx.shape)
    for rank, row, source, token, k in dispatched.entries():
        d_x[source, token] += d_tokens[rank, row].astype(np.float64)
        d_topk_weights[source, token, k] = d_weights[rank, row]
    return d_x, d_topk_weights


def slot_gradients(dispatched: Dispatched, d_slots, d_weights):
    """As dispatch_gradients, without expansion: d_slots is ``[R, R * T, H]``."""
    num_ranks, num_tokens, _ = dispatched.topk_idx.shape
    d_x = np.zeros((num_ranks, num_tokens, d_slots.shape[2]))
    d_topk_weights = np.zeros(dispatched.topk_idx.shape)
    sent = set()
    for rank, row, source, token, k in dispatched.entries():
        d_topk_weights[source, token, k] = d_weights[rank, row]
        sent.add((rank, source, token))
    for rank, source, token in sent:
        d_x[source, token] += d_slots[rank, source * num_tokens + token].astype(np.float64)
    return d_x, d_topk_weights


def combine_gradients(dispatched: Dispatched, y, weights, g):
    """Cotangents of y ``[R, capacity, H]`` and weights from that of out, ``[R, T, H]``."""
    d_y = np.zeros(y.shape)
    d_weights = np.zeros(weights.shape)
    for rank, row, source, token, _ in dispatched.entries():
        cotangent = g[source, token].astype(np.float64)
        d_y[rank, row] = weights[rank, row] * cotangent
        d_weights[rank, row] = y[rank, row].astype(np.float64) @ cotangent
    return d_y, d_weights


@dataclasses.dataclass(frozen=True)
class DenseMoe:
    """Value and gradients of ``loss = sum(g * out)`` for ``out[t] = sum_k w[t, k] * (x[t] @
    matrix[idx[t, k]])``.

    Attributes:
        out: float64 ``[N, H]``, N tokens of all ranks.
        d_x: ``[N, H]``.
        d_topk_weights: ``[N, K]``.
        d_matrices: ``[E, H, H]``.
    """

    out: np.ndarray
    d_x: np.ndarray
    d_topk_weights: np.ndarray
    d_matrices: np.ndarray


def dense_moe(x, topk_idx, topk_weights, matrices, g) -> DenseMoe:
    """A linear mixture of experts with no notion of ranks; topk_idx has no faulty entries."""
    x, topk_weights, matrices, g = (
        np.asarray(array, np.float64) for array in (x, topk_weights, matrices, g)
    )
    out, d_x = np.zeros_like(x), np.zeros_like(x)
    d_topk_weights, d_matrices = np.zeros_like(topk_weights), np.zeros_like(matrices)
    for token, k in zip(*np.nonzero(topk_idx >= 0), strict=True):
        expert, weight = topk_idx[token, k], topk_weights[token, k]
        output = x[token] @ matrices[expert]
        out[token] += weight * output
        d_x[token] += weight * (matrices[expert] @ g[token])
        d_topk_weights[token, k] = output @ g[token]
        d_matrices[expert] += weight * np.outer(x[token], g[token])
    return DenseMoe(out=out, d_x=d_x, d_topk_weights=d_topk_weights, d_matrices=d_matrices)
