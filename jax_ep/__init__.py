"""Expert-parallel dispatch and combine for JAX: native calls inside ``jit`` and ``shard_map``."""

import warnings

import jax

from .buffer import Buffer
from .config import EpConfig
from .errors import EpDataError, EpError, EpMismatchError, EpTimeoutError, EpUsageError
from .notify import Notice, notify_dispatch
from .ops import combine, dispatch, route
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
    "Notice",
    "Routed",
    "Routing",
    "combine",
    "dispatch",
    "notify_dispatch",
    "route",
]
