"""The low-latency operations as systems; padded rows are packed for the checks alone."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import jax_ep
from jax_ep.low_latency import combine_done_in_turn, combine_in_turn

from .workload import AXIS, Sizes, Workload

SCALE_GROUP = 128  # channels that share a scale


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("tokens", "weights", "group_sizes", "num_dropped", "handle", "token", "scales"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class Sent:
    """A LowLatencyRouted whose counts have the name that chains know."""

    tokens: jax.Array
    weights: jax.Array
    group_sizes: jax.Array
    num_dropped: jax.Array
    handle: Any
    token: jax.Array
    scales: jax.Array | None


@contextlib.contextmanager
def open_buffer(
    layout: str,
    make_operations: Callable[..., Any],
    timeout_s: float,
    workload: Workload,
    mesh: Mesh,
    num_sms: int | None,
    *,
    quantize: str | None = None,
    halves: bool = False,
) -> Iterator[Any]:
    """Operations on a buffer of their own.

    Args:
        layout: "compact" or "padded".
        make_operations: ``systems.Operations``.
        timeout_s: of the buffer, on GPUs.
        workload, mesh, num_sms: as ``System.open`` takes them.
        quantize: how dispatch is to do so; its results are then values and scales.
        halves: each operation is a start and its done, with nothing in between.
    """
    sizes = workload.sizes
    config = jax_ep.EpConfig(
        num_experts=sizes.E,
        num_experts_per_tok=sizes.K,
        hidden=sizes.H,
        max_tokens_per_rank=sizes.T,
        dtype=jnp.dtype(workload.case.dtype),
        mode="low_latency",
        num_sms=num_sms,
        timeout_s=None if mesh.devices.flat[0].platform == "cpu" else timeout_s,
    )
    options: dict[str, Any] = {"layout": layout}
    if layout == "compact":
        options["capacity"] = sizes.capacity
    if quantize:
        options["quantize"] = quantize
    with jax_ep.Buffer(mesh, AXIS, config, backend="native") as buffer:
        dispatch = functools.partial(_dispatch_halves if halves else _dispatch, buffer, options)
        yield make_operations(
            dispatch=dispatch,
            dispatch_in_turn=dispatch if halves else None,
            combine=functools.partial(
                _combine, buffer, sizes, _combine_halves if halves else jax_ep.low_latency_combine
            ),
            combine_in_turn=functools.partial(
                _combine_halves_in_turn if halves else _combine_in_turn, buffer
            ),
            rows=functools.partial(_rows, sizes),
            topk_idx=lambda sent: sent.handle.topk_idx,
        )
        buffer.check()


def _dispatch(buffer, options, x, topk_idx, topk_weights) -> Sent:
    return _sent(jax_ep.low_latency_dispatch(buffer, x, topk_idx, topk_weights, **options))


def _dispatch_halves(buffer, options, x, topk_idx, topk_weights, token=None) -> Sent:
    """``token``: what the start must come after, where no operand says so."""
    pending = jax_ep.low_latency_dispatch_start(
        buffer, x, topk_idx, topk_weights, after=token, **options
    )
    return _sent(jax_ep.low_latency_dispatch_done(buffer, pending))


def _sent(routed: jax_ep.LowLatencyRouted) -> Sent:
    return Sent(
        tokens=routed.tokens,
        weights=routed.weights,
        group_sizes=routed.counts,
        num_dropped=routed.num_dropped,
        handle=routed.handle,
        token=routed.token,
        scales=routed.scales,
    )


def _combine(buffer, sizes: Sizes, combine, y: jax.Array, sent: Sent) -> jax.Array:
    """``y`` of the shape of ``sent.tokens``, or packed rows, which are put in their places."""
    if y.ndim < sent.tokens.ndim:
        places = _places(sizes, sent.group_sizes)
        y = jnp.zeros(sent.tokens.shape, y.dtype).at[places].set(y, mode="drop")
    return combine(buffer, y, _routed(sent))


def _combine_halves(buffer, y: jax.Array, routed: jax_ep.LowLatencyRouted) -> jax.Array:
    pending = jax_ep.low_latency_combine_start(buffer, y, routed)
    return jax_ep.low_latency_combine_done(buffer, pending)


def _combine_in_turn(buffer, y: jax.Array, sent: Sent) -> tuple[jax.Array, Sent]:
    out, token = combine_in_turn(buffer, y, _routed(sent), sent.token)
    return out, dataclasses.replace(sent, token=token)


def _combine_halves_in_turn(buffer, y: jax.Array, sent: Sent) -> tuple[jax.Array, Sent]:
    pending = jax_ep.low_latency_combine_start(buffer, y, _routed(sent), after=sent.token)
    out, token = combine_done_in_turn(buffer, pending)
    return out, dataclasses.replace(sent, token=token)


def _routed(sent: Sent) -> jax_ep.LowLatencyRouted:
    return jax_ep.LowLatencyRouted(
        tokens=sent.tokens,
        weights=sent.weights,
        counts=sent.group_sizes,
        num_dropped=sent.num_dropped,
        handle=sent.handle,
        token=sent.token,
        stats=None,
    )


def _rows(sizes: Sizes, sent: Sent) -> jax.Array:
    """Packed rows; of values and scales, in float32."""
    tokens = sent.tokens
    if sent.scales is not None:
        scales = jnp.repeat(sent.scales, SCALE_GROUP, axis=-1)[..., : tokens.shape[-1]]
        tokens = tokens.astype(jnp.float32) * scales
    if tokens.ndim == 2:
        return tokens
    return tokens.at[_places(sizes, sent.group_sizes)].get(mode="fill", fill_value=0)


def _places(sizes: Sizes, group_sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Expert, and place in its block, of each packed row; no expert past the last one."""
    ends = jnp.cumsum(group_sizes)
    row = jnp.arange(sizes.capacity, dtype=jnp.int32)
    expert = jnp.searchsorted(ends, row, side="right").astype(jnp.int32)
    starts = jnp.append(ends - group_sizes, ends[-1:])
    return expert, row - starts[expert]
