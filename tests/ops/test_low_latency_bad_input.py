"""Wrong arguments of the low-latency operations raise while tracing and say what to do."""

import dataclasses

import cases
import jax
import jax.numpy as jnp
import ll_check
import numpy as np
import programs
import pytest
from ll_check import TINY

import jax_ep

ROWS = TINY.R * TINY.T * TINY.experts_per_rank


@pytest.fixture(scope="module", params=["reference", "native"])
def buffer(request):
    with ll_check.make_buffer(TINY, request.param) as buffer:
        yield buffer


def trace(buffer, function):
    """Traces ``function(x, topk_idx, topk_weights)`` over the buffer's mesh."""
    shapes = (
        jax.ShapeDtypeStruct((TINY.R * TINY.T, TINY.H), jnp.float32),
        jax.ShapeDtypeStruct((TINY.R * TINY.T, TINY.K), jnp.int32),
        jax.ShapeDtypeStruct((TINY.R * TINY.T, TINY.K), jnp.float32),
    )

    def program(*arrays):
        function(*arrays)
        return arrays[0]

    jax.jit(programs.sharded(buffer, program)).trace(*shapes)


def refused(buffer, function, *said):
    with pytest.raises(jax_ep.EpUsageError, match="(?s)" + ".*".join(said)):
        trace(buffer, function)


STARTS = (jax_ep.low_latency_dispatch, jax_ep.low_latency_dispatch_start)


@pytest.mark.parametrize("op", STARTS, ids=lambda op: op.__name__)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layout": "dense"}, ["layout='dense'", "'padded' or 'compact'"]),
        ({"layout": None}, ["layout=None", "'padded' or 'compact'"]),
        ({"capacity": 8}, ["capacity=8 is for layout='compact'", "leave capacity out"]),
        ({"layout": "compact", "capacity": 0}, ["capacity=0", "positive int"]),
        ({"after": 3}, ["after=3 is a int", "pass a Routed"]),
        ({"after": "x"}, ["after='x' is a str", "pass a Routed"]),
        ({"after": np.zeros((0, 3))}, [r"after has shape \(0, 3\)", "array with elements"]),
    ],
)
def test_options(buffer, op, options, said):
    refused(buffer, lambda *arrays: op(buffer, *arrays, **options), *said)


@pytest.mark.parametrize("op", STARTS, ids=lambda op: op.__name__)
def test_arrays(buffer, op):
    def more(x, topk_idx, topk_weights):
        arrays = (jnp.concatenate([a, a]) for a in (x, topk_idx, topk_weights))
        op(buffer, *arrays)

    refused(buffer, more, "x has 12 tokens", "max_tokens_per_rank=6")
    refused(buffer, lambda x, i, w: op(buffer, x, i.astype(jnp.int8), w), "topk_idx has dtype int8")
    refused(buffer, lambda x, i, w: op(buffer, x[:, :8], i, w), r"x has shape \(6, 8\)")


def test_stats(buffer):
    def with_stats(stats):
        return lambda *arrays: jax_ep.low_latency_dispatch(buffer, *arrays, stats=stats)

    zeros = jax_ep.LowLatencyStats.zeros(buffer.experts_per_rank, buffer.num_ranks)
    refused(buffer, with_stats(zeros.waited_ns), "stats=", "LowLatencyStats.zeros")
    short = dataclasses.replace(zeros, waited_ns=zeros.waited_ns[:1])
    refused(buffer, with_stats(short), r"stats.waited_ns has shape \(1,\)", r"pass shape \(4,\)")
    floats = dataclasses.replace(zeros, tokens_per_expert=zeros.tokens_per_expert * 1.0)
    refused(buffer, with_stats(floats), "tokens_per_expert has dtype float32", "int32")


@pytest.mark.parametrize(
    "op",
    [jax_ep.low_latency_combine, jax_ep.low_latency_combine_start],
    ids=lambda op: op.__name__,
)
def test_combine_arguments(buffer, op):
    def with_routed(function):
        return lambda *arrays: function(jax_ep.low_latency_dispatch(buffer, *arrays))

    refused(
        buffer, with_routed(lambda r: op(buffer, r.tokens, r.tokens)), "routed=", "pass the Low"
    )
    flat = (ROWS, TINY.H)
    refused(
        buffer,
        with_routed(lambda r: op(buffer, r.tokens.reshape(flat), r)),
        rf"y has shape \({ROWS}, {TINY.H}\)",
        "that of routed.tokens",
    )
    refused(
        buffer,
        with_routed(lambda r: op(buffer, r.tokens.astype(jnp.bfloat16), r)),
        "y has dtype bfloat16",
    )
    refused(
        buffer,
        with_routed(
            lambda r: op(buffer, r.tokens, dataclasses.replace(r, weights=r.weights.reshape(-1)))
        ),
        "routed.weights has shape",
        "one for each row",
    )
    with ll_check.make_buffer(TINY, buffer.backend) as other:
        refused(
            buffer,
            with_routed(lambda r: op(other, r.tokens, r)),
            f"routed was made by buffer {buffer.id}, not by buffer {other.id}",
        )


def test_pendings_of_the_wrong_kind_or_buffer(buffer):
    def started(function):
        def program(*arrays):
            routed = jax_ep.low_latency_dispatch(buffer, *arrays)
            function(
                jax_ep.low_latency_dispatch_start(buffer, *arrays, after=routed),
                jax_ep.low_latency_combine_start(buffer, routed.tokens, routed),
            )

        return program

    dispatch_done, combine_done = (
        jax_ep.low_latency_dispatch_done,
        jax_ep.low_latency_combine_done,
    )
    refused(
        buffer,
        started(lambda _, c: dispatch_done(buffer, c)),
        "low_latency_dispatch_done: pending=",
        "is a PendingCombine",
        "low_latency_dispatch_start",
    )
    refused(
        buffer,
        started(lambda d, _: combine_done(buffer, d)),
        "is a PendingDispatch",
        "low_latency_combine_start",
    )
    with ll_check.make_buffer(TINY, buffer.backend) as other:
        refused(buffer, started(lambda d, _: dispatch_done(other, d)), "pending was made by buffer")
        refused(buffer, started(lambda _, c: combine_done(other, c)), "pending was made by buffer")


def test_order_after_arguments(buffer):
    def program(x, topk_idx, topk_weights):
        routed = jax_ep.low_latency_dispatch(buffer, x, topk_idx, topk_weights)
        with pytest.raises(jax_ep.EpUsageError, match=r"after=.*pass a pending start"):
            jax_ep.order_after(x, x)
        with pytest.raises(jax_ep.EpUsageError, match="array has dtype int32"):
            jax_ep.order_after(topk_idx, routed)

    trace(buffer, program)


def test_the_other_modes_buffer_names_both_remedies(buffer):
    """A buffer serves one mode: the message says which op and which config would fit."""
    with programs.make_buffer(TINY, buffer.backend) as high:
        for op in STARTS:
            refused(
                high,
                lambda *arrays, op=op: op(high, *arrays),
                f"{op.__name__} was given buffer {high.id} of mode='high_throughput'",
                "call dispatch on it",
                r"EpConfig\(mode='low_latency'\)",
            )
        refused(
            high,
            lambda x, *_: jax_ep.low_latency_combine(high, x, None),
            "low_latency_combine was given",
            "call combine on it",
        )
        refused(
            high,
            lambda x, *_: jax_ep.low_latency_combine_done(high, None),
            "low_latency_combine_done was given",
            "call combine on it",
        )
    refused(
        buffer,
        lambda *arrays: jax_ep.dispatch(buffer, *arrays),
        f"dispatch was given buffer {buffer.id} of mode='low_latency'",
        "call low_latency_dispatch on it",
        r"EpConfig\(mode='high_throughput'\)",
    )
    refused(
        buffer,
        lambda x, *_: jax_ep.combine(buffer, x, None),
        "combine was given",
        "call low_latency_combine on it",
    )


def test_outside_shard_map_and_closed(rng):
    inputs = cases.make_inputs(TINY, rng)
    buffer = ll_check.make_buffer(TINY, "native")
    arrays = inputs.x[: TINY.T], inputs.topk_idx[: TINY.T], inputs.topk_weights[: TINY.T]
    for op in STARTS:
        with pytest.raises(jax_ep.EpUsageError, match=r"outside jax\.shard_map"):
            op(buffer, *arrays)
    buffer.close()
    for op in STARTS:
        with pytest.raises(jax_ep.EpUsageError, match="closed; make a new Buffer"):
            op(buffer, *arrays)


def test_programs_of_a_closed_buffer_raise(rng):
    inputs = cases.make_inputs(TINY, rng)
    with ll_check.make_buffer(TINY, "native") as buffer:

        def program(*arrays):
            pending = jax_ep.low_latency_dispatch_start(buffer, *arrays)
            return jax_ep.low_latency_dispatch_done(buffer, pending).counts

        run = jax.jit(programs.sharded(buffer, program))
        jax.block_until_ready(run(inputs.x, inputs.topk_idx, inputs.topk_weights))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"EpUsageError: buffer .* is closed"):
        jax.block_until_ready(run(inputs.x, inputs.topk_idx, inputs.topk_weights))
