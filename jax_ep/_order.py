"""``after=``: order between operations that share no data."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from .errors import EpUsageError
from .routed import Routed


def dependence(op: str, after: Any) -> jax.Array:
    """The array of ``after`` on which an operation can be made to depend.

    Of a Routed it is the weights, whose cotangent dispatch's backward waits for.

    Raises:
        EpUsageError: ``after`` is neither a Routed nor an array.
    """
    array = after.weights if isinstance(after, Routed) else after
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise EpUsageError(
            f"{op}: after={after!r} is a {type(after).__name__}; pass a Routed or an array that "
            "the earlier operation has made"
        )
    return jnp.asarray(array)


def hold(value: jax.Array, earlier: jax.Array) -> jax.Array:
    """``value``, bit for bit, which XLA cannot have before it has ``earlier``.

    Backwards the edge is reversed: the cotangent of ``earlier``, zeros of this use, waits for that
    of ``value``. Both must vary over the same axes of ``jax.shard_map``; value must be floating.
    An empty array holds nothing back.
    """
    return _hold(earlier.shape, earlier.dtype, value, earlier)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _hold(shape, dtype, value, earlier):
    return jnp.where(_never(earlier), jnp.nan, value)


def _hold_fwd(shape, dtype, value, earlier):
    return _hold(shape, dtype, value, earlier), None


def _hold_bwd(shape, dtype, _, cotangent):
    if not jnp.issubdtype(dtype, jnp.inexact):
        return cotangent, None
    zeros = jnp.zeros(shape, dtype)
    return cotangent, jnp.where(_never(cotangent), jnp.ones_like(zeros), zeros)


_hold.defvjp(_hold_fwd, _hold_bwd)


def _never(array: jax.Array) -> jax.Array:
    """False, which XLA does not find out by itself: no number is both NaN and infinite."""
    if array.size == 0:
        return jnp.zeros((), bool)
    first = array.ravel()[0].astype(jnp.float32)
    return jnp.isnan(first) & jnp.isinf(first)
