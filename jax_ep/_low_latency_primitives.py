"""One function per native low-latency target. No gradients here.

The fused targets are pure calls like those of ``_primitives``. A half is no function of its
operands: it takes or frees an epoch. So halves are a primitive of ours, lowered to a custom call
with a side effect that XLA neither merges nor removes; to JAX they have no effect, which leaves
``scan`` and ``checkpoint`` usable around them.

Every target takes a float32 scalar ``token`` last and returns one: data without content, whose
dependence orders operations.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from . import _float8, _primitives
from .errors import EpUsageError
from .low_latency_routed import LowLatencyStats
from .routed import RouteLayout


def dispatch(
    layout: RouteLayout,
    padded: bool,
    x: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array,
    stats: LowLatencyStats | None,
    token: jax.Array,
):
    """Target ``jax_ep_ll_dispatch``.

    Args:
        layout: static facts; ``capacity`` is ``E_l * R * T`` when padded.
        padded: whether every expert has a block of ``R * T`` rows.
        x: ``[T, H]``.
        topk_idx: int32 ``[T, K]``.
        topk_weights: float32 ``[T, K]``.
        stats: totals to add to, or None.
        token: float32 scalar.

    Returns:
        tokens ``[capacity, H]`` (with ``layout.float8`` perhaps a pair of values and scales),
        weights float32 ``[capacity]``, counts int32 ``[E_l]``, num_dropped int32 scalar, recv_rows
        int32 ``[R * T, K]``, sanitised topk_idx int32 ``[T, K]``, stats or None, token.
    """
    results = (
        *_received(layout, x, topk_idx),
        (topk_idx.shape, jnp.int32),
        *_stats_results(layout, stats),
        _TOKEN,
    )
    operands = (x, topk_idx, topk_weights, *_stats_operands(x, stats), token)
    flat = _primitives._call(
        _float8.target("jax_ep_ll_dispatch", layout.float8),
        layout,
        operands,
        results,
        padded=padded,
        **_float8.attributes(layout.float8),
    )
    flat = _pair_scales(layout, flat)
    return (*flat[:6], _stats(stats, *flat[6:8]), flat[8])


def combine(
    layout: RouteLayout,
    y: jax.Array,
    weights: jax.Array,
    topk_idx: jax.Array,
    recv_rows: jax.Array,
    token: jax.Array,
):
    """Target ``jax_ep_ll_combine``, weighted: ``[T, H]`` and a token."""
    operands = (y, weights, _primitives._empty(y), topk_idx, recv_rows, token)
    out, _, token = _combine(layout, operands, weighted=True)
    return out, token


def combine_with_scalars(
    layout: RouteLayout,
    y: jax.Array,
    row_scalars: jax.Array,
    topk_idx: jax.Array,
    recv_rows: jax.Array,
    token: jax.Array,
):
    """Target ``jax_ep_ll_combine``, unweighted, a float32 scalar of every row sent along.

    Returns:
        ``[T, H]``, float32 ``[T, K]``, token; as ``_primitives.combine_with_scalars``.
    """
    operands = (y, _primitives._empty(y), row_scalars, topk_idx, recv_rows, token)
    return _combine(layout, operands, weighted=False)


def combine_grad(
    layout: RouteLayout,
    g: jax.Array,
    topk_idx: jax.Array,
    recv_rows: jax.Array,
    weights: jax.Array,
    y: jax.Array,
    token: jax.Array,
):
    """Target ``jax_ep_ll_combine_grad``: as ``_primitives.combine_grad``, and a token.

    Rows that hold no token get zero.
    """
    results = ((y.shape, y.dtype), (weights.shape, jnp.float32), _TOKEN)
    operands = (g, topk_idx, recv_rows, weights, y, token)
    return _primitives._call("jax_ep_ll_combine_grad", layout, operands, results)


def dispatch_start(
    layout: RouteLayout,
    x: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array,
    token: jax.Array,
):
    """Target ``jax_ep_ll_dispatch_start``: sanitised topk_idx, ticket uint32 ``[2]``, token."""
    results = ((topk_idx.shape, jnp.int32), _TICKET, _TOKEN)
    operands = (x, topk_idx, topk_weights, token)
    target = _float8.target("jax_ep_ll_dispatch", layout.float8, "_start")
    return _half(target, layout, operands, results, **_float8.attributes(layout.float8))


def dispatch_done(
    layout: RouteLayout,
    padded: bool,
    x: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array,
    ticket: jax.Array,
    stats: LowLatencyStats | None,
    token: jax.Array,
):
    """Target ``jax_ep_ll_dispatch_done``: as ``dispatch``, without the sanitised topk_idx."""
    results = (*_received(layout, x, topk_idx), *_stats_results(layout, stats), _TOKEN)
    operands = (x, topk_idx, topk_weights, ticket, *_stats_operands(x, stats), token)
    flat = _half(
        _float8.target("jax_ep_ll_dispatch", layout.float8, "_done"),
        layout,
        operands,
        results,
        padded=padded,
        **_float8.attributes(layout.float8),
    )
    flat = _pair_scales(layout, flat)
    return (*flat[:5], _stats(stats, *flat[5:7]), flat[7])


def combine_start(
    layout: RouteLayout,
    y: jax.Array,
    weights: jax.Array,
    topk_idx: jax.Array,
    recv_rows: jax.Array,
    token: jax.Array,
):
    """Target ``jax_ep_ll_combine_start``: ticket uint32 ``[2]``, token."""
    operands = (y, weights, topk_idx, recv_rows, token)
    return _half("jax_ep_ll_combine_start", layout, operands, (_TICKET, _TOKEN))


def combine_done(
    layout: RouteLayout,
    y: jax.Array,
    weights: jax.Array,
    topk_idx: jax.Array,
    recv_rows: jax.Array,
    ticket: jax.Array,
    token: jax.Array,
):
    """Target ``jax_ep_ll_combine_done``: ``[T, H]``, token."""
    operands = (y, weights, topk_idx, recv_rows, ticket, token)
    results = (((topk_idx.shape[0], y.shape[1]), y.dtype), _TOKEN)
    return _half("jax_ep_ll_combine_done", layout, operands, results)


def inference_only(op: str, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays themselves, in a program that is neither differentiated nor vmapped.

    Raises:
        EpUsageError: it is; ``op`` names the half in the message.
    """
    return tuple(_inference_only_p.bind(*arrays, op=op))


_TOKEN = ((), jnp.float32)
_TICKET = ((2,), jnp.uint32)


def _received(layout: RouteLayout, x: jax.Array, topk_idx: jax.Array):
    num_tokens, num_experts_per_tok = topk_idx.shape
    return (
        *_float8.token_results(layout.float8, (layout.capacity, x.shape[1]), x.dtype),
        ((layout.capacity,), jnp.float32),
        ((layout.experts_per_rank,), jnp.int32),
        ((), jnp.int32),
        ((layout.num_ranks * num_tokens, num_experts_per_tok), jnp.int32),
    )


def _pair_scales(layout: RouteLayout, flat):
    """Flat results with values and scales, where these come back, as one."""
    if layout.float8 is None or layout.float8.dequantize:
        return flat
    values, scales, *others = flat
    return (values, scales), *others


def _stats_operands(like: jax.Array, stats: LowLatencyStats | None):
    if stats is None:
        return tuple(jnp.zeros_like(like, shape=(0,), dtype=d) for d in (jnp.int32, jnp.uint32))
    return stats.tokens_per_expert, stats.waited_ns


def _stats_results(layout: RouteLayout, stats: LowLatencyStats | None):
    num_experts = 0 if stats is None else layout.experts_per_rank
    num_peers = 0 if stats is None else layout.num_ranks
    return ((num_experts,), jnp.int32), ((num_peers,), jnp.uint32)


def _stats(stats: LowLatencyStats | None, tokens_per_expert: jax.Array, waited_ns: jax.Array):
    return None if stats is None else LowLatencyStats(tokens_per_expert, waited_ns)


def _combine(layout: RouteLayout, operands, *, weighted: bool):
    y, _, _, topk_idx, _, _ = operands
    results = (
        ((topk_idx.shape[0], y.shape[1]), y.dtype),
        ((0,) if weighted else topk_idx.shape, jnp.float32),
        _TOKEN,
    )
    attributes = {"weighted": weighted, "with_scalars": not weighted}
    return _primitives._call("jax_ep_ll_combine", layout, operands, results, **attributes)


def _half(target: str, layout: RouteLayout, operands, results, **attributes: int):
    rank = lax.axis_index(layout.axis_names)
    operands = _primitives.cast_varying(layout.axis_names, rank, *operands)
    attributes |= {"buffer_id": layout.buffer_id, "fingerprint": layout.fingerprint}
    # XLA:GPU wraps a custom call whose operand or result is a slice, as in a scan, together with
    # the slice, and leaves the original where it was if it has a side effect: the half would
    # run twice. It does not look behind barriers, which cost nothing but the slice's copy.
    results = _half_p.bind(
        *lax.optimization_barrier(operands),
        target=target + layout.target_suffix,
        results=tuple(
            jax.typeof(_primitives._result_type(shape, dtype, operands[0]))
            for shape, dtype in results
        ),
        attributes=tuple(sorted(attributes.items())),
    )
    return lax.optimization_barrier(results)


def _lower_half(context: mlir.LoweringRuleContext, *operands, target, results, attributes):
    rule = jax.ffi.ffi_lowering(target, has_side_effect=True)
    return rule(context, *operands, **{name: np.int64(value) for name, value in attributes})


_half_p = Primitive("jax_ep_half")
_half_p.multiple_results = True
_half_p.def_abstract_eval(lambda *_, results, **__: results)
mlir.register_lowering(_half_p, _lower_half)


def _refuse_jvp(primals: Any, tangents: Any, *, op: str):
    raise EpUsageError(
        f"{op} cannot be differentiated: a half of an operation is for inference. Use the fused "
        f"{op.rsplit('_', 1)[0]}, which can, or jax.lax.stop_gradient on its arguments"
    )


def _refuse_batch(args: Any, dims: Any, *, op: str):
    raise EpUsageError(
        f"{op} cannot be vmapped: every call takes a part of the window. Use the fused "
        f"{op.rsplit('_', 1)[0]}, which vmap calls one by one, or a Python loop"
    )


_inference_only_p = Primitive("jax_ep_inference_only")
_inference_only_p.multiple_results = True
_inference_only_p.def_abstract_eval(lambda *avals, op: avals)
mlir.register_lowering(_inference_only_p, lambda context, *operands, op: operands)
ad.primitive_jvps[_inference_only_p] = _refuse_jvp
batching.primitive_batchers[_inference_only_p] = _refuse_batch
