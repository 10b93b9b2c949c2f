"""EpConfig: its limits, its normal form, and that errors say what to do."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import jax_ep

GOOD = {
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "hidden": 64,
    "max_tokens_per_rank": 128,
    "dtype": jnp.bfloat16,
}


def test_is_frozen_hashable_and_comparable():
    config = jax_ep.EpConfig(**GOOD)
    same = jax_ep.EpConfig(**(GOOD | {"dtype": "bfloat16", "hidden": np.int64(64)}))
    assert config == same
    assert hash(config) == hash(same)
    assert config != jax_ep.EpConfig(**(GOOD | {"hidden": 128}))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.hidden = 3


@pytest.mark.parametrize("dtype", ["float32", jnp.float16, np.dtype(jnp.bfloat16)])
def test_dtype_becomes_numpy_dtype(dtype):
    config = jax_ep.EpConfig(**(GOOD | {"dtype": dtype}))
    assert isinstance(config.dtype, np.dtype)
    assert config.row_bytes == 64 * np.dtype(config.dtype).itemsize


@pytest.mark.parametrize(
    ("max_tokens", "chunk", "expected"),
    [(128, None, 128), (5000, None, 4096), (128, 16, 16), (128, 500, 128), (1, None, 1)],
)
def test_tokens_per_epoch(max_tokens, chunk, expected):
    config = jax_ep.EpConfig(**(GOOD | {"max_tokens_per_rank": max_tokens, "chunk_tokens": chunk}))
    assert config.tokens_per_epoch == expected


@pytest.mark.parametrize("max_tokens", [1, 128, 65_535])
def test_low_latency_carries_all_tokens_in_one_epoch(max_tokens):
    settings = GOOD | {"max_tokens_per_rank": max_tokens, "mode": "low_latency"}
    assert jax_ep.EpConfig(**settings).tokens_per_epoch == max_tokens


@pytest.mark.parametrize(
    ("changes", "named", "remedy"),
    [
        ({"num_experts": 0}, "num_experts=0", "positive int"),
        ({"num_experts": True}, "num_experts=True is a bool", "positive int"),
        ({"num_experts": 16.0}, "num_experts=16.0 is a float", "positive int"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok=17 .* num_experts=16", "lower"),
        ({"num_experts": 99, "num_experts_per_tok": 33}, "num_experts_per_tok=33", "at most 32"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok=0", "positive int"),
        ({"hidden": -8}, "hidden=-8", "positive int"),
        ({"hidden": 12}, "hidden=12 with dtype=bfloat16 makes rows of 24", "multiple of 8"),
        ({"hidden": 6, "dtype": "float32"}, "hidden=6 with dtype=float32", "multiple of 4"),
        ({"hidden": 2**24 + 8}, "hidden=16777224", "at most 16777216"),
        ({"max_tokens_per_rank": 0}, "max_tokens_per_rank=0", "positive int"),
        ({"max_tokens_per_rank": 65_536}, "max_tokens_per_rank=65536", "at most 65535"),
        ({"dtype": "float64"}, "dtype='float64'", "use float32, bfloat16 or float16"),
        ({"dtype": "int32"}, "dtype='int32'", "use float32"),
        ({"dtype": "nonsense"}, "dtype='nonsense'", "use float32"),
        ({"dtype": None}, "dtype=None", "use float32"),
        ({"mode": "fast"}, "mode='fast'", "use mode='high_throughput' or mode='low_latency'"),
        ({"mode": None}, "mode=None", "use mode='high_throughput'"),
        (
            {"mode": "low_latency", "chunk_tokens": 16},
            "chunk_tokens=16 has no meaning with mode='low_latency'",
            "leave it out, and lower max_tokens_per_rank",
        ),
        ({"chunk_tokens": 0}, "chunk_tokens=0", "positive int"),
        ({"chunk_tokens": 70_000}, "chunk_tokens=70000", "at most 65535"),
        ({"num_sms": 0}, "num_sms=0", "positive int"),
        ({"num_sms": "all"}, "num_sms='all' is a str", "positive int"),
        ({"timeout_s": 0}, "timeout_s=0", "greater than 0"),
        ({"timeout_s": float("inf")}, "timeout_s=inf", "finite"),
        ({"timeout_s": float("nan")}, "timeout_s=nan", "finite"),
        ({"timeout_s": True}, "timeout_s=True", "seconds"),
        ({"timeout_s": "soon"}, "timeout_s='soon' is a str", "seconds"),
    ],
)
def test_bad_values_name_argument_value_and_remedy(changes, named, remedy):
    with pytest.raises(jax_ep.EpUsageError, match=f"(?s){named}.*{remedy}"):
        jax_ep.EpConfig(**(GOOD | changes))


def test_usage_error_is_also_a_value_error():
    with pytest.raises(ValueError, match="hidden"):
        jax_ep.EpConfig(**(GOOD | {"hidden": 0}))
    assert issubclass(jax_ep.EpUsageError, jax_ep.EpError)
    assert issubclass(jax_ep.EpError, RuntimeError)
