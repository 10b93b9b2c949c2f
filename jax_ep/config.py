"""The static description of an expert-parallel exchange."""

import dataclasses
import math
import operator
from typing import Any

import jax.numpy as jnp
import numpy as np

from .errors import EpUsageError

MAX_EXPERTS_PER_TOKEN = 32
MAX_UINT16 = 65_535  # tokens of a rank and experts of a rank travel as 16-bit numbers
MAX_HIDDEN = 2**24  # sizes of rows are 32-bit numbers, with room to multiply
ROW_BYTES_MULTIPLE = 16
DEFAULT_CHUNK_TOKENS = 4096
MODES = ("high_throughput", "low_latency")

_DTYPES = tuple(jnp.dtype(name) for name in ("float32", "bfloat16", "float16"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpConfig:
    """Shapes and limits that every rank of a group agrees on. Immutable and hashable.

    Args:
        num_experts: E, experts over all ranks.
        num_experts_per_tok: K, experts each token is sent to; at most 32 and at most E.
        hidden: H, elements in a token's row, at most 2**24. A row must be a multiple of 16 bytes.
        max_tokens_per_rank: the largest T that one call may bring; at most 65,535.
        dtype: element type of the rows: float32, bfloat16 or float16.
        mode: "high_throughput" for ``dispatch`` and ``combine``, which carry any number of tokens
            in chunks, or "low_latency" for ``low_latency_dispatch`` and ``low_latency_combine``,
            whose window holds all ``max_tokens_per_rank`` tokens of a decode step at once. A buffer
            serves one mode; a model that needs both makes two buffers.
        chunk_tokens: tokens per rank that one epoch carries; the window grows with it, not with T.
            None stands for min(max_tokens_per_rank, 4096). High throughput only.
        num_sms: streaming multiprocessors that a GPU kernel may take; None stands for half the
            device's. Of no effect on CPUs.
        timeout_s: seconds a rank waits for a peer before it gives up; None stands for 20 on CPUs
            and 300 on GPUs.

    Raises:
        EpUsageError: an argument is outside its limits.
    """

    num_experts: int
    num_experts_per_tok: int
    hidden: int
    max_tokens_per_rank: int
    dtype: Any = jnp.bfloat16
    mode: str = "high_throughput"
    chunk_tokens: int | None = None
    num_sms: int | None = None
    timeout_s: float | None = None

    def __post_init__(self):
        self._set("num_experts", positive_int("num_experts", self.num_experts))
        self._set(
            "num_experts_per_tok",
            positive_int(
                "num_experts_per_tok", self.num_experts_per_tok, at_most=MAX_EXPERTS_PER_TOKEN
            ),
        )
        if self.num_experts_per_tok > self.num_experts:
            raise EpUsageError(
                f"num_experts_per_tok={self.num_experts_per_tok} is more than "
                f"num_experts={self.num_experts}; a token can go to each expert "
                "once, so lower num_experts_per_tok"
            )
        self._set("hidden", positive_int("hidden", self.hidden, at_most=MAX_HIDDEN))
        self._set(
            "max_tokens_per_rank",
            positive_int("max_tokens_per_rank", self.max_tokens_per_rank, at_most=MAX_UINT16),
        )
        self._set("dtype", _row_dtype(self.dtype))
        if self.row_bytes % ROW_BYTES_MULTIPLE:
            multiple = ROW_BYTES_MULTIPLE // self.dtype.itemsize
            raise EpUsageError(
                f"hidden={self.hidden} with dtype={self.dtype.name} makes rows of {self.row_bytes} "
                f"bytes; rows must be a multiple of {ROW_BYTES_MULTIPLE} bytes, so make hidden a "
                f"multiple of {multiple}"
            )
        if self.mode not in MODES:
            raise EpUsageError(
                f"mode={self.mode!r} is not known; use mode='high_throughput' or mode='low_latency'"
            )
        if self.chunk_tokens is not None:
            if self.mode == "low_latency":
                raise EpUsageError(
                    f"chunk_tokens={self.chunk_tokens!r} has no meaning with mode='low_latency', "
                    "where one epoch carries all tokens; leave it out, and lower "
                    "max_tokens_per_rank for a smaller window"
                )
            self._set(
                "chunk_tokens", positive_int("chunk_tokens", self.chunk_tokens, at_most=MAX_UINT16)
            )
        if self.num_sms is not None:
            self._set("num_sms", positive_int("num_sms", self.num_sms))
        if self.timeout_s is not None:
            self._set("timeout_s", _seconds(self.timeout_s))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def row_bytes(self) -> int:
        """Bytes in one token's row: hidden times the size of an element."""
        return self.hidden * self.dtype.itemsize

    @property
    def tokens_per_epoch(self) -> int:
        """C, tokens per rank that one epoch carries.

        ``max_tokens_per_rank`` in low-latency mode, else chunk_tokens, or its default if it is
        None.
        """
        if self.mode == "low_latency":
            return self.max_tokens_per_rank
        return min(self.max_tokens_per_rank, self.chunk_tokens or DEFAULT_CHUNK_TOKENS)


def experts_per_rank(config: EpConfig, num_ranks: int) -> int:
    """E_l = E / R.

    Raises:
        EpUsageError: the experts do not divide among the ranks, or too many fall to each.
    """
    if config.num_experts % num_ranks:
        raise EpUsageError(
            f"num_experts={config.num_experts} does not divide among {num_ranks} ranks; "
            f"make it a multiple of {num_ranks}, or use an axis_name of another size"
        )
    local = config.num_experts // num_ranks
    if local > MAX_UINT16:
        raise EpUsageError(
            f"num_experts={config.num_experts} puts {local} experts on each of "
            f"{num_ranks} ranks; at most {MAX_UINT16} fit, so use more ranks or fewer experts"
        )
    return local


def positive_int(name: str, value: Any, *, at_most: int | None = None) -> int:
    """Returns ``value`` as an int of at least 1 (and at most ``at_most``).

    Raises:
        EpUsageError: it is a bool, not an integer, or outside these limits.
    """
    limit = "" if at_most is None else f" of at most {at_most}"
    remedy = f"pass a positive int{limit}"
    if isinstance(value, (bool, np.bool_)):
        raise EpUsageError(f"{name}={value!r} is a bool; {remedy}")
    try:
        number = operator.index(value)
    except TypeError:
        raise EpUsageError(f"{name}={value!r} is a {type(value).__name__}; {remedy}") from None
    if number < 1 or (at_most is not None and number > at_most):
        raise EpUsageError(f"{name}={number} is out of range; {remedy}")
    return number


def boolean(name: str, value: Any) -> bool:
    """Returns ``value``, of Python or numpy, as a bool; raises EpUsageError if it is none."""
    if not isinstance(value, (bool, np.bool_)):
        raise EpUsageError(f"{name}={value!r} is a {type(value).__name__}; pass a bool")
    return bool(value)


def _row_dtype(dtype: Any) -> np.dtype:
    try:
        normal = jnp.dtype(dtype)
    except TypeError:
        normal = None
    if normal not in _DTYPES:
        raise EpUsageError(
            f"dtype={dtype!r} cannot be a row's type; use float32, bfloat16 or float16"
        )
    return normal


def _seconds(value: Any) -> float:
    remedy = "pass a finite number of seconds greater than 0, or None for the platform's default"
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        raise EpUsageError(f"timeout_s={value!r} is a {type(value).__name__}; {remedy}") from None
    if isinstance(value, (bool, np.bool_)) or not math.isfinite(seconds) or seconds <= 0:
        raise EpUsageError(f"timeout_s={value!r} is out of range; {remedy}")
    return seconds
