"""``after=``: order between operations that share no data.

What an operation must come after becomes a float32 scalar without content, the order token. The
low-latency calls take it as an operand and give one. The others take none: an operand that they
have anyway is held back until the token is there.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from ._primitives import cast_varying
from .errors import EpUsageError
from .low_latency_routed import LowLatencyRouted, PendingCombine, PendingDispatch
from .routed import Routed
from .routing import Routing


def order_token(op: str, after: Any) -> jax.Array:
    """A float32 scalar that depends on ``after``. Its value means nothing.

    Raises:
        EpUsageError: ``after`` is neither a result of ours nor an array with elements.
    """
    if after is None:
        return jnp.zeros((), jnp.float32)
    array = source(op, after)
    return array if _has_token(after) else jnp.ravel(array)[0].astype(jnp.float32)


def source(op: str, after: Any) -> jax.Array:
    """The array of ``after`` that the order token is taken from.

    Of a Routed it is the weights, whose cotangent dispatch's backward waits for.

    Raises:
        EpUsageError: as ``order_token``.
    """
    if _has_token(after):
        return after.token
    if isinstance(after, Routed):
        after = after.weights
    elif isinstance(after, Routing):
        after = after.counts
    if not hasattr(after, "shape") or not hasattr(after, "dtype"):
        raise EpUsageError(
            f"{op}: after={after!r} is a {type(after).__name__}; pass a Routed, a Routing, a "
            "LowLatencyRouted, a pending start or an array that the earlier operation has made"
        )
    if math.prod(after.shape) == 0:
        raise EpUsageError(
            f"{op}: after has shape {tuple(after.shape)} and so no element to wait for; pass an "
            "array with elements"
        )
    return jnp.asarray(after)


def hold(op: str, axis_names: tuple[str, ...], value: jax.Array, after: Any) -> jax.Array:
    """``value``, bit for bit, which XLA cannot have before it has ``after``; None holds nothing.

    Backwards the edge is reversed: the cotangent of ``after``, zeros of this use, waits for that
    of a floating value. An empty value cannot be held.
    """
    if after is None:
        return value
    value, token = cast_varying(axis_names, value, order_token(op, after))
    return _held(value, token) if jnp.issubdtype(value.dtype, jnp.inexact) else behind(value, token)


def behind(value: jax.Array, token: jax.Array) -> jax.Array:
    """``value``, bit for bit, behind the token; without the reversed edge."""
    other = jnp.nan if jnp.issubdtype(value.dtype, jnp.inexact) else -1
    return jnp.where(_never(token), jnp.asarray(other, value.dtype), value)


def _has_token(after: Any) -> bool:
    return isinstance(after, (LowLatencyRouted, PendingDispatch, PendingCombine))


@jax.custom_vjp
def _held(value, token):
    return behind(value, token)


def _held_fwd(value, token):
    return _held(value, token), None


def _held_bwd(_, cotangent):
    if cotangent.size == 0:
        return cotangent, jnp.sum(cotangent).astype(jnp.float32)
    return cotangent, jnp.where(_never(cotangent.ravel()[0]), 1.0, 0.0)


_held.defvjp(_held_fwd, _held_bwd)


def _never(scalar: jax.Array) -> jax.Array:
    """False, which XLA does not find out by itself: no number is both NaN and infinite."""
    return jnp.isnan(scalar) & jnp.isinf(scalar)
