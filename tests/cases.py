"""One table of named shapes for tests and benchmarks, and fresh random inputs for them.

Every rank's arrays are stacked along the first axis, as the sharded programs take them: x is ``[R *
T, H]``.
"""

import dataclasses
import os
import secrets

import jax.numpy as jnp
import numpy as np

SEED_VARIABLE = "JAX_EP_TEST_SEED"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A shape, a routing and the options of the call.

    Attributes:
        name: unique in the table.
        T, H, K, E, R: tokens per rank, hidden size, experts per token, experts, ranks.
        dtype: name of the rows' type.
        chunk: tokens per rank in one epoch; None leaves the default.
        alignment: expert_alignment.
        load: capacity as a multiple of the mean number of rows per rank, T * K; None is the worst
            case.
        zero_tail, expand: as in dispatch.
        routing: a function of this module's ``ROUTINGS``.
    """

    name: str
    T: int
    H: int
    K: int
    E: int
    R: int
    dtype: str = "float32"
    chunk: int | None = None
    alignment: int = 1
    load: float | None = None
    zero_tail: bool = True
    expand: bool = True
    routing: str = "uniform"

    @property
    def experts_per_rank(self) -> int:
        return self.E // self.R

    @property
    def max_tokens(self) -> int:
        """max_tokens_per_rank of the case's buffer; calls with T = 0 still need room for one."""
        return max(self.T, 1)

    @property
    def capacity(self) -> int | None:
        """The argument of dispatch."""
        if self.load is None:
            return None
        rows = max(1, round(self.load * self.T * self.K))
        return -(-rows // self.alignment) * self.alignment

    @property
    def rows(self) -> int:
        """Expert-major rows: the capacity given, or the documented default."""
        if self.capacity is not None:
            return self.capacity
        most = self.R * self.T * min(self.K, self.experts_per_rank)
        most += self.experts_per_rank * (self.alignment - 1)
        return max(1, -(-most // self.alignment)) * self.alignment


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arguments of dispatch for all ranks: x ``[R * T, H]``, the others ``[R * T, K]``."""

    x: np.ndarray
    topk_idx: np.ndarray
    topk_weights: np.ndarray


def fresh_seed() -> int:
    """The seed in JAX_EP_TEST_SEED, or a new one."""
    return int(os.environ.get(SEED_VARIABLE) or secrets.randbits(32))


def make_inputs(case: Case, rng: np.random.Generator) -> Inputs:
    """Random inputs of the case's shapes and routing."""
    return Inputs(
        x=random_rows(rng, (case.R * case.T, case.H), case.dtype),
        topk_idx=ROUTINGS[case.routing](rng, case).astype(np.int32),
        topk_weights=rng.uniform(0.1, 1.0, (case.R * case.T, case.K)).astype(np.float32),
    )


def random_rows(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Normal numbers, already rounded to dtype."""
    return rng.normal(size=shape).astype(jnp.dtype(dtype))


def _distinct(rng: np.random.Generator, case: Case, popularity: np.ndarray | None = None):
    """K distinct experts per token, drawn in proportion to popularity (Gumbel top-k)."""
    scores = rng.gumbel(size=(case.R * case.T, case.E))
    if popularity is not None:
        scores = scores + np.log(popularity)
    return np.argsort(-scores, axis=1)[:, : case.K]


def _uniform(rng, case):
    return _distinct(rng, case)


def _skewed(rng, case):
    return _distinct(rng, case, 1.0 / np.arange(1, case.E + 1) ** 2)


def _one_expert(rng, case):
    """Every token names one and the same expert, at a random k, and no other."""
    idx = np.full((case.R * case.T, case.K), -1)
    tokens = np.arange(case.R * case.T)
    idx[tokens, rng.integers(case.K, size=tokens.size)] = rng.integers(case.E)
    return idx


def _nobody(rng, case):
    return np.full((case.R * case.T, case.K), -1)


def _some_nobody(rng, case):
    idx = _distinct(rng, case)
    return np.where(rng.random(idx.shape) < 0.3, -1, idx)


def _empty_ranks(rng, case):
    """One rank sends nothing, and one rank receives nothing."""
    idx = _distinct(rng, case).reshape(case.R, case.T, case.K)
    idx[rng.integers(case.R)] = -1
    owner = idx // case.experts_per_rank
    idx = np.where(owner == rng.integers(case.R), -1, idx)
    return idx.reshape(-1, case.K)


def _out_of_range(rng, case):
    idx = _distinct(rng, case)
    strange = np.array([-2, case.E, case.E + 1, -case.E, 2**31 - 1, -(2**31), 65_536, 1 << 20])
    return np.where(rng.random(idx.shape) < 0.3, rng.choice(strange, idx.shape), idx)


def _duplicates(rng, case):
    return rng.integers(-1, max(1, case.E // 2), size=(case.R * case.T, case.K))


ROUTINGS = {
    "uniform": _uniform,
    "skewed": _skewed,
    "one_expert": _one_expert,
    "nobody": _nobody,
    "some_nobody": _some_nobody,
    "empty_ranks": _empty_ranks,
    "out_of_range": _out_of_range,
    "duplicates": _duplicates,
}

CASES = (
    Case(name="one_rank", T=9, H=32, K=2, E=4, R=1),
    Case(name="one_rank_drops", T=9, H=32, K=2, E=4, R=1, load=0.5, alignment=2),
    Case(name="two_ranks", T=17, H=64, K=2, E=8, R=2),
    Case(name="three_ranks", T=11, H=24, K=3, E=9, R=3),
    Case(name="four_ranks_bf16", T=16, H=24, K=4, E=8, R=4, dtype="bfloat16"),
    Case(name="eight_ranks_f16", T=13, H=40, K=4, E=16, R=8, dtype="float16"),
    Case(name="eight_ranks_skewed", T=21, H=32, K=4, E=32, R=8, routing="skewed"),
    Case(name="one_expert", T=15, H=16, K=3, E=8, R=4, routing="one_expert"),
    Case(name="nobody", T=7, H=16, K=2, E=8, R=4, routing="nobody"),
    Case(name="some_nobody", T=19, H=32, K=4, E=8, R=4, routing="some_nobody"),
    Case(name="empty_ranks", T=12, H=16, K=2, E=12, R=3, routing="empty_ranks"),
    Case(name="out_of_range", T=14, H=16, K=4, E=8, R=2, routing="out_of_range"),
    Case(name="duplicates", T=14, H=16, K=6, E=8, R=4, routing="duplicates"),
    Case(name="no_tokens", T=0, H=16, K=2, E=8, R=4),
    Case(name="no_tokens_aligned", T=0, H=16, K=2, E=8, R=2, alignment=4),
    Case(name="one_token", T=1, H=16, K=2, E=8, R=8),
    Case(name="one_token_one_expert_each", T=1, H=16, K=1, E=8, R=8),
    Case(name="chunked", T=29, H=32, K=3, E=8, R=4, chunk=8),
    Case(name="chunk_of_one", T=6, H=16, K=2, E=4, R=2, chunk=1),
    Case(name="chunked_even_bf16", T=32, H=32, K=2, E=8, R=8, chunk=8, dtype="bfloat16"),
    Case(name="many_k", T=8, H=16, K=22, E=64, R=4),
    Case(name="all_experts_of_32", T=5, H=16, K=32, E=32, R=2),
    Case(name="many_experts", T=9, H=16, K=8, E=520, R=2),
    Case(name="aligned", T=13, H=32, K=3, E=8, R=4, alignment=8),
    Case(name="aligned_skewed", T=13, H=32, K=3, E=16, R=4, alignment=4, routing="skewed"),
    Case(name="drops", T=20, H=32, K=3, E=8, R=4, load=0.6),
    Case(name="drops_aligned", T=20, H=32, K=3, E=8, R=4, load=0.8, alignment=8),
    Case(name="drops_chunked", T=27, H=16, K=4, E=8, R=2, load=0.5, chunk=5, routing="skewed"),
    Case(name="capacity_one", T=5, H=16, K=2, E=4, R=2, load=0.01),
    Case(name="spare_capacity", T=8, H=16, K=2, E=8, R=8, load=12.0),
    Case(name="loose_tail", T=12, H=32, K=2, E=8, R=4, zero_tail=False),
    Case(name="loose_tail_aligned", T=12, H=16, K=2, E=8, R=2, zero_tail=False, alignment=4),
    Case(name="wide_rows", T=6, H=1024, K=2, E=8, R=4, dtype="bfloat16"),
    Case(name="slots_one_rank", T=9, H=32, K=2, E=4, R=1, expand=False),
    Case(name="slots_two_ranks_bf16", T=17, H=64, K=3, E=8, R=2, expand=False, dtype="bfloat16"),
    Case(name="slots_three_ranks", T=11, H=24, K=3, E=9, R=3, expand=False, routing="empty_ranks"),
    Case(name="slots_eight_f16", T=13, H=40, K=4, E=16, R=8, expand=False, dtype="float16"),
    Case(name="slots_chunked", T=29, H=32, K=3, E=8, R=4, expand=False, chunk=8),
    Case(name="slots_many_k", T=8, H=16, K=22, E=64, R=4, expand=False, routing="some_nobody"),
    Case(name="slots_nobody", T=7, H=16, K=2, E=8, R=4, expand=False, routing="nobody"),
    Case(name="slots_duplicates", T=14, H=16, K=6, E=8, R=4, expand=False, routing="duplicates"),
    Case(name="slots_no_tokens", T=0, H=16, K=2, E=8, R=4, expand=False, alignment=4),
    Case(name="slots_tail", T=9, H=16, K=2, E=8, R=2, expand=False, alignment=4, zero_tail=False),
    Case(name="slots_drops", T=27, H=16, K=4, E=8, R=2, expand=False, load=0.4, alignment=4),
    Case(name="slots_capacity_one", T=5, H=16, K=2, E=4, R=2, expand=False, load=0.01),
)

BENCHMARK_CASES = (
    Case(name="decode_many_experts", T=128, H=1024, K=8, E=64, R=8),
    Case(name="prefill_few_experts", T=1024, H=1024, K=2, E=16, R=8),
)

BY_NAME = {case.name: case for case in CASES + BENCHMARK_CASES}
