"""Checks of the low-latency operations' arguments, made while JAX traces."""

import dataclasses
from typing import Any

import numpy as np

from . import _float8
from .buffer import Buffer
from .errors import EpUsageError
from .low_latency_routed import (
    LowLatencyRouted,
    LowLatencyStats,
)
from .ops import (
    MAX_CAPACITY,
    _check_array,
    _check_dispatch_arrays,
    _check_mode,
    _check_place,
    _layout,
)
from .routed import RouteLayout

MODE = "low_latency"


def check_dispatch(
    op: str, buffer: Buffer, x, topk_idx, topk_weights, *, layout: Any, capacity: Any, **float8: Any
) -> tuple[RouteLayout, bool]:
    """Static facts of a dispatch, and whether rows are padded; float8: as ``_float8.options``."""
    facts, padded = _check_rows(op, buffer, x, topk_idx, topk_weights, layout, capacity)
    offered = buffer.offers("jax_ep_ll_dispatch_float8")
    options = _float8.options(op, **float8, offered=offered)
    return dataclasses.replace(facts, float8=options), padded


def _check_rows(
    op: str, buffer: Buffer, x, topk_idx, topk_weights, layout: Any, capacity: Any
) -> tuple[RouteLayout, bool]:
    _check_mode(op, buffer, MODE)
    _check_place(op, buffer)
    _check_dispatch_arrays(buffer, x, topk_idx, topk_weights)
    if layout not in ("padded", "compact"):
        raise EpUsageError(f"layout={layout!r} is not known; use 'padded' or 'compact'")
    num_tokens = x.shape[0]
    if layout == "compact":
        return _compact_layout(buffer, num_tokens, capacity), False
    if capacity is not None:
        raise EpUsageError(
            f"capacity={capacity!r} is for layout='compact'; a padded result has R * T rows for "
            "every expert, so leave capacity out"
        )
    rows = buffer.experts_per_rank * buffer.num_ranks * num_tokens
    if rows > MAX_CAPACITY:
        raise EpUsageError(
            f"layout='padded' makes {rows} rows, more than {MAX_CAPACITY}; use layout='compact'"
        )
    facts = _compact_layout(buffer, num_tokens, None)
    return dataclasses.replace(facts, capacity=rows), True


def _compact_layout(buffer: Buffer, num_tokens: int, capacity: Any) -> RouteLayout:
    return _layout(buffer, num_tokens, capacity, expert_alignment=1, zero_tail=False, expand=True)


def check_combine(op: str, buffer: Buffer, y: Any, routed: Any) -> RouteLayout:
    _check_mode(op, buffer, MODE)
    _check_place(op, buffer)
    if not isinstance(routed, LowLatencyRouted):
        raise EpUsageError(
            f"routed={routed!r} is a {type(routed).__name__}; pass the LowLatencyRouted that "
            "low_latency_dispatch returned"
        )
    facts = routed.handle.layout
    _check_owner("routed", buffer, facts)
    shape, weights_shape = tuple(routed.tokens.shape), tuple(routed.tokens.shape[:-1])
    _check_array("y", y, buffer.config.dtype, shape, "that of routed.tokens")
    _check_array(
        "routed.weights",
        routed.weights,
        np.dtype(np.float32),
        weights_shape,
        "one for each row of routed.tokens",
    )
    return facts


def _check_owner(name: str, buffer: Buffer, facts: RouteLayout) -> None:
    if (facts.buffer_id, facts.fingerprint) != (buffer.id, buffer.fingerprint):
        raise EpUsageError(
            f"{name} was made by buffer {facts.buffer_id}, not by buffer {buffer.id}; pass the "
            "buffer that made it"
        )


def check_pending(op: str, buffer: Buffer, pending: Any, kind: type) -> None:
    _check_mode(op, buffer, MODE)
    _check_place(op, buffer)
    if not isinstance(pending, kind):
        raise EpUsageError(
            f"{op}: pending={pending!r} is a {type(pending).__name__}; pass the {kind.__name__} "
            f"that {op.replace('_done', '_start')} returned"
        )
    _check_owner("pending", buffer, pending.layout)


def check_stats(buffer: Buffer, stats: Any) -> LowLatencyStats | None:
    if stats is None:
        return None
    if not isinstance(stats, LowLatencyStats):
        raise EpUsageError(
            f"stats={stats!r} is a {type(stats).__name__}; pass a LowLatencyStats, to begin with "
            "LowLatencyStats.zeros(buffer.experts_per_rank, buffer.num_ranks)"
        )
    for name, dtype, size, meaning in (
        ("tokens_per_expert", np.int32, buffer.experts_per_rank, "[E_l]"),
        ("waited_ns", np.uint32, buffer.num_ranks, "[R]"),
    ):
        _check_array(f"stats.{name}", getattr(stats, name), np.dtype(dtype), (size,), meaning)
    return stats
