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
        fanout: experts of one rank that one token names, at most.
    """

    T: int
    H: int
    K: int
    E: int
    R: int
    capacity: int
    slots: int
    fanout: int

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


def expected_rows(workload: Workload, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """A rank's tokens, ``[rows, H]`` expert by expert, and group sizes ``[E_l]``, from numpy."""
    sizes, inputs = workload.sizes, workload.inputs
    expert = inputs.topk_idx.reshape(-1)
    entry = np.argsort(expert, kind="stable")  # by expert, then source rank, then token
    here = entry[expert[entry] // sizes.experts_per_rank == rank]
    counts = np.bincount(expert[here] % sizes.experts_per_rank, minlength=sizes.experts_per_rank)
    return inputs.x[here // sizes.K], counts


def _sizes(case: cases.Case, topk_idx: np.ndarray) -> Sizes:
    owner = (topk_idx // case.experts_per_rank).reshape(case.R, case.T, case.K)
    entries = np.stack([(owner == rank).sum(axis=2) for rank in range(case.R)])  # [to, from, T]
    return Sizes(
        T=case.T,
        H=case.H,
        K=case.K,
        E=case.E,
        R=case.R,
        capacity=_round_up(entries.sum(axis=(1, 2)).max(), CAPACITY_MULTIPLE),
        slots=_round_up((entries > 0).sum(axis=2).max(), SLOTS_MULTIPLE),
        fanout=int(entries.max()),
    )


def _round_up(number: int, multiple: int) -> int:
    return -(-int(number) // multiple) * multiple
