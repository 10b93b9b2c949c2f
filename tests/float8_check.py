"""What quantised rows must be, in numpy, and rows that are hard to quantise.

Written from the words of ``dispatch``; the rounding to float8 is that of ml_dtypes.
"""

import cases
import jax.numpy as jnp
import ml_dtypes
import numpy as np

FORMATS = ("float32", "power_of_two")
GROUP = 128
FLOAT8 = ml_dtypes.float8_e4m3fn


def quantized(rows, scale_format):
    """Values and scales of float rows ``[..., H]``, group by group."""
    rows = np.asarray(rows, np.float32)
    values = np.zeros(rows.shape, FLOAT8)
    scales = np.zeros((*rows.shape[:-1], -(-rows.shape[-1] // GROUP)), np.float32)
    with np.errstate(all="ignore"):
        for group in range(scales.shape[-1]):
            channels = np.s_[..., group * GROUP : (group + 1) * GROUP]
            scale, inverse = _scale(rows[channels], scale_format)
            scales[..., group] = scale
            values[channels] = (rows[channels] * inverse[..., None]).astype(FLOAT8)
    codes = values.view(np.uint8)
    codes[codes == 0xFF] = 0x7F  # one NaN for both signs
    return values, scales


def _scale(group, scale_format):
    amax = np.fmax.reduce(np.abs(group), axis=-1, initial=np.float32(0))
    if scale_format == "float32":
        scale, inverse = amax * np.float32(1 / 448), np.float32(448) / amax
    else:
        mantissa, exponent = np.frexp(amax * np.float32(1 / 448))
        power = np.ldexp(np.float32(1), np.where(mantissa == 0.5, exponent - 1, exponent))
        scale = np.where(np.isinf(amax), np.float32(np.inf), power)
        inverse = 1 / scale
    tiny = amax < np.float32(2.0**-100)
    return np.where(tiny, np.float32(1), scale), np.where(tiny, np.float32(1), inverse)


def dequantized(rows, scale_format, dtype):
    """The rows that come back."""
    values, scales = quantized(rows, scale_format)
    with np.errstate(invalid="ignore", over="ignore"):
        products = values.astype(np.float32) * of_channels(scales, values.shape[-1])
        return products.astype(dtype)


def of_channels(scales, hidden):
    """A group's number for each of its channels."""
    return np.repeat(scales, GROUP, axis=-1)[..., :hidden]


def bound(rows, scale_format, dtype):
    """How far a row that comes back may be from ``rows``, as ``dispatch`` promises."""
    dtype = jnp.dtype(dtype)
    x = np.abs(np.asarray(rows, np.float64))
    hidden = x.shape[-1]
    amax = np.stack([x[..., i : i + GROUP].max(-1) for i in range(0, hidden, GROUP)], axis=-1)
    smallest = amax / 458_752 * (2 if scale_format == "power_of_two" else 1)
    way = np.maximum(x / 16, of_channels(smallest, hidden))
    info = ml_dtypes.finfo(dtype)
    return way + (x + way) * float(info.eps) / 2 + float(info.smallest_subnormal)


def hard_rows(rng, hidden, dtype):
    """``[rows, hidden]`` of dtype: zeros, NaN, infinities, ties, subnormals, all magnitudes."""
    dtype = jnp.dtype(dtype)
    info = ml_dtypes.finfo(dtype)
    normal = rng.normal(size=hidden)
    here = rng.random(hidden) < 0.2
    with np.errstate(over="ignore"):
        rows = [
            normal,
            np.zeros(hidden),
            np.full(hidden, -0.0),
            np.full(hidden, np.nan),
            np.where(here, np.nan, normal),
            np.where(here, np.inf, normal),
            np.where(here, -np.inf, -normal),
            np.where(here, np.inf, np.where(rng.random(hidden) < 0.2, np.nan, normal)),
            rng.integers(-9, 10, hidden) * float(info.smallest_subnormal),
            rng.uniform(-1, 1, hidden) * float(info.max),
            rng.choice([-1, 1], hidden) * 2.0 ** rng.uniform(-133, 128, hidden),
            normal * 2.0 ** np.repeat(rng.uniform(-106, -96, hidden), GROUP)[:hidden],
            np.where(here, normal * 1e-6, normal),
            np.where(np.arange(hidden) % GROUP == 0, 2.0**-100, 0),
            _ties(rng, hidden),
            _ties(rng, hidden) * 2.0**-9,
        ]
        return np.stack(rows).astype(dtype)


def _ties(rng, hidden):
    """Numbers halfway between two of float8's; 448 in each group keeps the scale at one."""
    codes = np.arange(0x7F, dtype=np.uint8).view(FLOAT8).astype(np.float64)
    halfway = (codes[1:] + codes[:-1]) / 2
    row = rng.choice([-1, 1], hidden) * rng.choice(halfway, hidden)
    row[::GROUP] = 448
    return row


def hard_inputs(rng, case) -> cases.Inputs:
    """Inputs of the case whose x are hard rows, again and again."""
    inputs = cases.make_inputs(case, rng)
    rows = hard_rows(rng, case.H, case.dtype)
    return cases.Inputs(
        np.resize(rows, inputs.x.shape).astype(rows.dtype), inputs.topk_idx, inputs.topk_weights
    )


def same_bits(seen, expected, name) -> None:
    """Equal shapes, dtypes and bits, one NaN being as good as another."""
    seen, expected = np.asarray(seen), np.asarray(expected)
    assert (seen.shape, seen.dtype) == (expected.shape, expected.dtype), name
    unsigned = np.dtype(f"uint{8 * seen.itemsize}")
    nan = np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(seen.astype(np.float32)), nan, err_msg=name)
    np.testing.assert_array_equal(
        seen.view(unsigned)[~nan], expected.view(unsigned)[~nan], err_msg=name
    )
