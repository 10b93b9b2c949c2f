"""Expert-parallel dispatch and combine for JAX: native calls inside ``jit`` and ``shard_map``."""

import warnings

import jax

from ._route import route
from .buffer import Buffer
from .config import EpConfig
from .errors import EpDataError, EpError, EpMismatchError, EpTimeoutError, EpUsageError
from .layout import LowLatencyLayout, get_low_latency_rdma_size_hint
from .low_latency import (
    low_latency_combine,
    low_latency_combine_done,
    low_latency_combine_start,
    low_latency_dispatch,
    low_latency_dispatch_done,
    low_latency_dispatch_start,
    order_after,
)
from .low_latency_routed import LowLatencyRouted, LowLatencyStats, PendingCombine, PendingDispatch
from .notify import Notice, notify_dispatch
from .ops import combine, dispatch
from .routed import Handle, Routed
from .routing import Routing

_OLDEST_JAX = (0, 10, 2)

if jax.__version_info__ < _OLDEST_JAX:
    warnings.warn(
        f"jax_ep is tested with jax {'.'.join(map(str, _OLDEST_JAX))} and newer, and this is jax "
        f"{jax.__version__}; upgrade with 'pip install -U jax'",
        stacklevel=2,
    )

__all__ = [
    "Buffer",
    "EpConfig",
    "EpDataError",
    "EpError",
    "EpMismatchError",
    "EpTimeoutError",
    "EpUsageError",
    "Handle",
    "LowLatencyLayout",
    "LowLatencyRouted",
    "LowLatencyStats",
    "Notice",
    "PendingCombine",
    "PendingDispatch",
    "Routed",
    "Routing",
    "combine",
    "dispatch",
    "get_low_latency_rdma_size_hint",
    "low_latency_combine",
    "low_latency_combine_done",
    "low_latency_combine_start",
    "low_latency_dispatch",
    "low_latency_dispatch_done",
    "low_latency_dispatch_start",
    "notify_dispatch",
    "order_after",
    "route",
]
