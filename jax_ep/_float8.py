"""Rows quantised to float8 for the way: options, shapes of results, and the formula in JAX.

The formula is that of ``ffi/protocol/quantize.h``, step by step: each is one IEEE operation,
rounded to nearest even, so every backend gives the same bits.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .config import boolean
from .errors import EpUsageError
from .routed import Float8

SCALE_GROUP = 128  # channels that share a scale
SCALE_FORMATS = {"float32": 1, "power_of_two": 2}  # ScaleFormat in quantize.h

_VALUES = np.dtype(jnp.float8_e4m3fn)
_LARGEST = np.float32(448)
_SMALLEST_AMAX = np.float32(2.0**-100)
_INFINITY, _MANTISSA, _NOT_SIGN = np.uint32([0x7F800000, 0x007FFFFF, 0x7FFFFFFF])


def options(
    op: str, quantize: Any, scale_format: Any, dequantize: Any, *, offered: bool
) -> Float8 | None:
    """Checks the arguments of a dispatch; None where rows travel as they are.

    Args:
        op: the operation, for messages.
        quantize, scale_format, dequantize: as in ``dispatch``.
        offered: whether the backend in use can quantise.

    Raises:
        EpUsageError: an argument does not fit.
    """
    if scale_format not in SCALE_FORMATS:
        raise EpUsageError(
            f"{op}: scale_format={scale_format!r} is not known; use 'float32' or 'power_of_two'"
        )
    dequantize = boolean("dequantize", dequantize)
    if quantize is None:
        if dequantize or scale_format != "float32":
            raise EpUsageError(
                f"{op}: dequantize={dequantize!r} and scale_format={scale_format!r} say nothing "
                "without quantize; pass quantize='float8_e4m3fn' too, or leave them out"
            )
        return None
    if not _names_float8(quantize):
        raise EpUsageError(
            f"{op}: quantize={quantize!r} is not known; use 'float8_e4m3fn', or None for rows as "
            "they are"
        )
    if not offered:
        raise EpUsageError(
            f"{op}: quantize={quantize!r} is not offered by the native backend of these devices in "
            "this version; leave it out, or make the Buffer with backend='reference'"
        )
    return Float8(scale_format=scale_format, dequantize=dequantize)


def _names_float8(quantize: Any) -> bool:
    try:
        return np.dtype(quantize) == _VALUES
    except TypeError:
        return False


def num_scales(hidden: int) -> int:
    """Scales of a row of ``hidden`` channels; the last group may be shorter."""
    return -(-hidden // SCALE_GROUP)


def target(name: str, float8: Float8 | None, half: str = "") -> str:
    """A dispatch's native target."""
    return f"{name}{'' if float8 is None else '_float8'}{half}"


def attributes(float8: Float8 | None) -> dict[str, int]:
    """What the target is told about the way."""
    if float8 is None:
        return {}
    return {
        "scale_format": SCALE_FORMATS[float8.scale_format],
        "dequantize": int(float8.dequantize),
    }


def token_results(float8: Float8 | None, shape: tuple[int, int], dtype: Any):
    """Shapes and dtypes of a target's results for tokens: rows, or values and scales."""
    if float8 is None or float8.dequantize:
        return ((shape, dtype),)
    return (shape, _VALUES), ((shape[0], num_scales(shape[1])), jnp.float32)


def packed_result(shape: tuple[int, int]):
    """Shape and dtype of the room that a high-throughput target has for its packed rows.

    ``shape`` is ``[T, H]``. Values and scales lie one after the other, filled up to 16 bytes. Only
    GPUs use it: their handlers have no memory of their own, and XLA plans and shares this.
    """
    num_tokens, hidden = shape
    return (num_tokens, -(-(hidden + 4 * num_scales(hidden)) // 16) * 16), jnp.uint8


def row_cotangent(float8: Float8 | None, d_tokens, like: jax.Array) -> jax.Array:
    """The cotangent of rows, straight through the quantisation; nothing from values and scales.

    ``like`` has the rows' dtype.
    """
    if float8 is None or float8.dequantize:
        return d_tokens
    return jnp.zeros_like(like, shape=d_tokens[0].shape)


def through(float8: Float8 | None, rows: jax.Array):
    """What becomes of rows that travel: themselves, (values, scales), or rows once more."""
    if float8 is None:
        return rows
    if float8.dequantize:
        return _there_and_back(float8.scale_format, rows)
    return quantize(rows, float8.scale_format)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _there_and_back(scale_format: str, rows: jax.Array) -> jax.Array:
    """Differentiated as the identity."""
    return dequantize(*quantize(rows, scale_format), rows.dtype)


@_there_and_back.defjvp
def _there_and_back_jvp(scale_format, primals, tangents):
    return _there_and_back(scale_format, *primals), tangents[0]


def quantize(rows: jax.Array, scale_format: str) -> tuple[jax.Array, jax.Array]:
    """Values float8_e4m3fn ``[..., H]`` and scales float32 ``[..., ceil(H / 128)]``.

    With amax the largest magnitude in a group, NaNs left out: ``scale = amax / 448``, for
    "power_of_two" rounded up to one, and ``value = e4m3fn(row / scale)``. Groups of amax below
    2**-100 have scale 1.
    """
    *outer, hidden = rows.shape
    groups = num_scales(hidden)
    padding = [(0, 0)] * len(outer) + [(0, groups * SCALE_GROUP - hidden)]
    grouped = jnp.pad(rows.astype(jnp.float32), padding).reshape(*outer, groups, SCALE_GROUP)
    magnitude = _bits(grouped) & _NOT_SIGN
    amax = _number(jnp.max(jnp.where(magnitude > _INFINITY, 0, magnitude), axis=-1))
    scale = amax * (np.float32(1) / _LARGEST)
    if scale_format == "power_of_two":
        bits = (_bits(scale) + _MANTISSA) & ~_MANTISSA
        scale = _number(bits)
        # The exponents of a power of two and of its inverse add up to twice that of one.
        inverse = jnp.where(bits >= _INFINITY, 0, _number(np.uint32(254 << 23) - bits))
    else:
        inverse = _LARGEST / amax
    has_size = amax >= _SMALLEST_AMAX
    scale, inverse = jnp.where(has_size, scale, 1), jnp.where(has_size, inverse, 1)
    codes = _encode(grouped * inverse[..., None]).reshape(*outer, groups * SCALE_GROUP)
    return lax.bitcast_convert_type(codes[..., :hidden], jnp.float8_e4m3fn), scale


def dequantize(values: jax.Array, scales: jax.Array, dtype: Any) -> jax.Array:
    """``value * scale`` of its group in float32, rounded to dtype."""
    of_channel = jnp.repeat(scales, SCALE_GROUP, axis=-1)[..., : values.shape[-1]]
    return (values.astype(jnp.float32) * of_channel).astype(dtype)


def _encode(numbers: jax.Array) -> jax.Array:
    """uint8 codes of float32 numbers. XLA's own conversion rounds to float16 on its way."""
    bits = _bits(numbers)
    magnitude = bits & _NOT_SIGN
    subnormal = jnp.round(_number(magnitude) * np.float32(2**9))  # counts the smallest number
    subnormal = jnp.where(subnormal < 8, subnormal, 8).astype(jnp.uint32)
    rounded = magnitude + np.uint32(0x7FFFF) + (magnitude >> 20 & 1)
    normal = jnp.minimum((rounded >> 20) - np.uint32((127 - 7) << 3), np.uint32(0x7E))
    code = jnp.where(magnitude < np.uint32((127 - 6) << 23), subnormal, normal)
    code = jnp.where(magnitude > _INFINITY, np.uint32(0x7F), bits >> 24 & np.uint32(0x80) | code)
    return code.astype(jnp.uint8)


def _bits(numbers: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(numbers, jnp.uint32)


def _number(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def without_gradient(float8: Float8 | None, op: str, x: jax.Array) -> jax.Array:
    """``x``, in a program that is not differentiated in it where values and scales come back.

    The cotangent of float8 values is float8 in JAX, which would not do as a gradient.

    Raises:
        EpUsageError: it is; ``op`` names the operation in the message.
    """
    if float8 is None or float8.dequantize:
        return x
    return _without_gradient_p.bind(x, op=op)


def _refuse_jvp(primals: Any, tangents: Any, *, op: str):
    raise EpUsageError(
        f"{op} with dequantize=False cannot be differentiated in x: the cotangent of float8 values "
        "would be float8. Pass dequantize=True, whose gradient goes straight through, or "
        "jax.lax.stop_gradient(x)"
    )


_without_gradient_p = Primitive("jax_ep_without_gradient")
_without_gradient_p.def_abstract_eval(lambda x, op: x)
_without_gradient_p.def_impl(lambda x, op: x)
mlir.register_lowering(_without_gradient_p, lambda context, x, op: [x])
ad.primitive_jvps[_without_gradient_p] = _refuse_jvp
batching.primitive_batchers[_without_gradient_p] = lambda args, dims, op: (
    _without_gradient_p.bind(*args, op=op),
    dims[0],
)
