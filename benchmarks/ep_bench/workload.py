"""One point of the benchmark: a shape, its inputs, and the static sizes its routing needs."""

import dataclasses

import cases
import numpy as np

CAPACITY_MULTIPLE = 64
SLOTS_MULTIPLE = 8
AXIS = "expert"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of one exchange; hashable.

    Attributes:
        T, H, K, E, R: tokens per rank, hidden size, experts per token, experts, ranks.
        capacity: rows of every rank's expert-major output, the same for all systems: as many as
            the fullest rank receives, rounded up.
        slots: messages from one rank to another, at most; what a capacity-padded exchange pads to.
        messages: messages that one rank sends or receives, its own included, at most.
        fanout: experts of one rank that one token names, at most.
        rows: rows that the fullest rank receives.
        wire_rows: messages between different ranks that cross the busiest direction of any rank's
            link: distinct (token, remote rank) pairs, the most that one rank sends or receives.
    """

    T: int
    H: int
    K: int
    E: int
    R: int
    capacity: int
    slots: int
    messages: int
    fanout: int
    rows: int
    wire_rows: int

    @property
    def experts_per_rank(self) -> int:
        return self.E // self.R


@dataclasses.dataclass(frozen=True)
class Workload:
    """A case of ``tests/cases.py``, its inputs for all ranks stacked, and its sizes.

    ``inputs.topk_weights`` sum to 1 for each token, so that a round trip through experts that
    change nothing, and its gradient of half the sum of squares, return the tokens: chains of any
    length keep their numbers.
    """

    case: cases.Case
    inputs: cases.Inputs
    sizes: Sizes


def make(case: cases.Case, rng: np.random.Generator) -> Workload:
    """Draws inputs for the case, whose routing must name K distinct experts for each token.

    Raises:
        ValueError: the experts do not divide among the ranks.
    """
    if case.E % case.R:
        raise ValueError(f"E={case.E} does not divide among R={case.R} ranks; choose other --shape")
    inputs = cases.make_inputs(case, rng)
    total = inputs.topk_weights.sum(axis=1, keepdims=True)
    inputs = dataclasses.replace(inputs, topk_weights=inputs.topk_weights / total)
    return Workload(case=case, inputs=inputs, sizes=_sizes(case, inputs.topk_idx))


def expected_sources(workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    """Which token every rank should hold in each row, from numpy.

    Returns:
        int32 ``[R, capacity]``, places in the stacked x, -1 past the last row; and group sizes,
        int32 ``[R, E_l]``.
    """
    sizes, topk_idx = workload.sizes, workload.inputs.topk_idx
    expert = topk_idx.reshape(-1)
    entry = np.argsort(expert, kind="stable")  # by expert, then source rank, then token
    counts = np.bincount(expert, minlength=sizes.E).reshape(sizes.R, -1).astype(np.int32)
    sources = np.full((sizes.R, sizes.capacity), -1, np.int32)
    start = 0
    for rank, rows in enumerate(counts.sum(axis=1)):
        sources[rank, :rows] = entry[start : start + rows] // sizes.K
        start += rows
    return sources, counts


def expected_rows(workload: Workload, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """A rank's tokens, ``[rows, H]`` expert by expert, and group sizes ``[E_l]``, from numpy."""
    sources, counts = (array[rank] for array in expected_sources(workload))
    return workload.inputs.x[sources[sources >= 0]], counts


def _sizes(case: cases.Case, topk_idx: np.ndarray) -> Sizes:
    owner = (topk_idx // case.experts_per_rank).reshape(case.R, case.T, case.K)
    entries = np.stack([(owner == rank).sum(axis=2) for rank in range(case.R)])  # [to, from, T]
    messages = (entries > 0).sum(axis=2)  # [to, from]
    remote = messages * (1 - np.eye(case.R, dtype=int))
    rows = int(entries.sum(axis=(1, 2)).max())
    return Sizes(
        T=case.T,
        H=case.H,
        K=case.K,
        E=case.E,
        R=case.R,
        capacity=_round_up(rows, CAPACITY_MULTIPLE),
        slots=_round_up(messages.max(), SLOTS_MULTIPLE),
        messages=_round_up(_busiest(messages), SLOTS_MULTIPLE),
        fanout=int(entries.max()),
        rows=rows,
        wire_rows=_busiest(remote),
    )


def _busiest(messages: np.ndarray) -> int:
    return int(max(messages.sum(axis=0).max(), messages.sum(axis=1).max()))


def _round_up(number: int, multiple: int) -> int:
    return -(-int(number) // multiple) * multiple
