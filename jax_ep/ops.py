"""The public operations: every argument is checked while JAX traces, then the backend is called."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _float8, _reference, _vjp
from ._order import hold
from ._primitives import cast_varying
from .buffer import Buffer
from .config import boolean, positive_int
from .errors import EpUsageError
from .routed import Handle, Routed, RouteLayout
from .routing import Routing

MAX_CAPACITY = 2**31 - 1  # rows are numbered in int32


def dispatch(
    buffer: Buffer,
    x: jax.Array,
    topk_idx: jax.Array | None = None,
    topk_weights: jax.Array | None = None,
    *,
    routing: Routing | None = None,
    capacity: int | None = None,
    expert_alignment: int = 1,
    zero_tail: bool = True,
    expand: bool = True,
    quantize: str | None = None,
    scale_format: str = "float32",
    dequantize: bool = False,
    after: Any = None,
) -> Routed:
    """Sends every token to the ranks that hold its experts; call it inside ``jax.shard_map``.

    All ranks of the group must make the call, with the same shapes. Pure: JAX and XLA may repeat,
    merge or remove it. Differentiable in ``x`` and ``topk_weights``.

    Args:
        buffer: an open Buffer made for the mesh that ``jax.shard_map`` runs over.
        x: ``[T, H]`` in the config's dtype, this rank's tokens; T from 0 to
            ``max_tokens_per_rank``.
        topk_idx: int32 ``[T, K]``, each token's experts out of all E; -1 stands for no expert. An
            entry outside [-1, E), and a token's later entry for an expert it already has, are
            treated as -1 and recorded for ``buffer.check()``. Left out where ``routing`` is given.
        topk_weights: float32 ``[T, K]``.
        routing: what ``route`` or ``notify_dispatch`` returned for these tokens' ``topk_idx``: no
            counts are exchanged. It may be used any number of times.
        capacity: expert-major rows, static, a multiple of ``expert_alignment``. None stands
            for the most that can arrive, ``R * T * min(K, E_l)`` rows and ``E_l * (expert_alignment
            - 1)`` rows between segments, rounded up to a multiple and at least one multiple. Of a
            smaller capacity the rows past its end are dropped, which starves the last experts;
            ``Routed.num_dropped`` counts them, and they add nothing to combine and to gradients.
        expert_alignment: every expert's segment is rounded up to a multiple of this many rows; the
            added rows are 0.
        zero_tail: whether the rows past the last segment are zero. False leaves them unspecified,
            which is faster and enough for ``jax.lax.ragged_dot`` and its like.
        expand: True gives ``Routed.tokens`` as expert-major rows, ``[capacity, H]``. False keeps
            one copy of each token, ``[R * T, H]``, and ``Routed.row_map`` says where each
            expert-major row finds its token: for grouped matmuls that gather rows themselves. All
            other fields, and what combine takes, are the same; slots without a row are zero
            whatever ``zero_tail`` says.
        quantize: None, or "float8_e4m3fn" for rows that travel so, a scale for 128 channels.
        scale_format: "float32" makes the largest magnitude of each 128 channels 448, which is
            float8's largest; "power_of_two" rounds that scale up.
        dequantize: whether ``Routed.tokens`` are rows again, in the config's dtype, about 1/16 off
            (docs/sharp-bits.md has the bound), the gradient going straight through. False gives
            float8 values and ``Routed.scales``, and cannot be differentiated in x.
        after: what this operation must come after, where nothing else says so: a Routed, a Routing,
            or an array that an earlier operation has made. Gradients then run in the reverse order.
            Operations that share no data need it where several processes share the buffer.

    Returns:
        A Routed.

    Raises:
        EpUsageError: an argument does not fit, the buffer is closed, or the call is not inside
            ``jax.shard_map`` over the buffer's mesh with all its axes larger than 1 manual.
    """
    _check_mode("dispatch", buffer, "high_throughput")
    _check_place("dispatch", buffer)
    if routing is not None:
        topk_idx = _check_routing(buffer, topk_idx, routing)
    _check_dispatch_arrays(buffer, x, topk_idx, topk_weights)
    layout = _layout(buffer, jnp.shape(x)[0], capacity, expert_alignment, zero_tail, expand)
    offered = buffer.offers(f"jax_ep_dispatch{'' if routing is None else '_routed'}_float8")
    float8 = _float8.options("dispatch", quantize, scale_format, dequantize, offered=offered)
    layout = dataclasses.replace(layout, float8=float8)
    x = _float8.without_gradient(float8, "dispatch", jnp.asarray(x))
    backend = _reference if buffer.backend == "reference" else _vjp
    if routing is None:
        operands, send = (x, topk_idx, topk_weights), backend.dispatch
    else:
        operands = (x, topk_idx, routing.row_index, routing.counts, topk_weights)
        send = backend.dispatch_routed
    *operands, topk_weights = cast_varying(buffer.axis_names, *map(jnp.asarray, operands))
    results = send(layout, *operands, hold("dispatch", buffer.axis_names, topk_weights, after))
    tokens, weights, group_sizes, valid_sizes, num_dropped, topk_idx, recv_rows, row_map = results
    tokens, scales = tokens if isinstance(tokens, tuple) else (tokens, None)
    return Routed(
        tokens=tokens,
        weights=weights,
        group_sizes=group_sizes,
        valid_sizes=valid_sizes,
        num_dropped=num_dropped,
        row_map=row_map,
        handle=Handle(topk_idx=topk_idx, recv_rows=recv_rows, layout=layout),
        scales=scales,
    )


def combine(buffer: Buffer, y: jax.Array, routed: Routed, *, after: Any = None) -> jax.Array:
    """Brings the experts' outputs back and sums them: ``out[t] = sum over k of weight_k * y_k``.

    The weights are ``routed.weights``. Sums are made in float32 in a fixed order and rounded once
    per rank, so the result does not depend on timing. Entries of -1 and dropped rows add nothing.
    Pure, and differentiable in ``y`` and ``routed.weights``.

    Args:
        buffer: the Buffer that dispatched.
        y: ``[capacity, H]`` in the config's dtype: one output row for each expert-major row, which
            are those of ``routed.tokens``, or with ``expand=False`` of ``routed.row_map``. Rows
            that hold no token are not read.
        routed: dispatch's result.
        after: as in ``dispatch``.

    Returns:
        ``[T, H]`` in the config's dtype, this rank's tokens.

    Raises:
        EpUsageError: an argument does not fit, ``routed`` is another buffer's, the buffer is
            closed, or the call is not inside ``jax.shard_map`` over the buffer's mesh with all its
            axes larger than 1 manual.
    """
    _check_mode("combine", buffer, "high_throughput")
    _check_place("combine", buffer)
    _check_combine_arrays(buffer, y, routed)
    handle = routed.handle
    y, weights, topk_idx, recv_rows = cast_varying(
        buffer.axis_names,
        jnp.asarray(y),
        jnp.asarray(routed.weights),
        handle.topk_idx,
        handle.recv_rows,
    )
    weights = hold("combine", buffer.axis_names, weights, after)
    backend = _reference if buffer.backend == "reference" else _vjp
    return backend.combine(handle.layout, y, weights, topk_idx, recv_rows)


def _check_mode(op: str, buffer: Buffer, mode: str) -> None:
    """Requires an open buffer of a mode; ``op`` is an operation of that mode."""
    if not isinstance(buffer, Buffer):
        raise EpUsageError(
            f"{op}: buffer={buffer!r} is a {type(buffer).__name__}; pass the jax_ep.Buffer"
        )
    buffer.require_open(op)
    if buffer.config.mode != mode:
        other = f"low_latency_{op}" if mode == "high_throughput" else op.split("_")[2]
        raise EpUsageError(
            f"{op} was given buffer {buffer.id} of mode={buffer.config.mode!r}; call {other} on "
            f"it, or make another Buffer with EpConfig(mode={mode!r})"
        )


def _check_place(op: str, buffer: Buffer) -> None:
    """Requires shard_map over a mesh like the buffer's, every axis larger than 1 manual."""
    mesh = jax.sharding.get_abstract_mesh()
    manual = frozenset(mesh.manual_axes)
    unbound = [axis for axis in buffer.axis_names if axis not in manual]
    if mesh.empty or not manual:
        raise EpUsageError(
            f"{op} was called outside jax.shard_map, so the axes {buffer.axis_names} of buffer "
            f"{buffer.id} are not bound; call {op} in a function given to "
            "jax.shard_map(..., mesh=buffer.mesh)"
        )
    if dict(mesh.shape) != dict(buffer.mesh.shape):
        raise EpUsageError(
            f"{op} runs over a mesh of axes {dict(mesh.shape)}, but buffer {buffer.id} was made "
            f"for {dict(buffer.mesh.shape)}; pass mesh=buffer.mesh to jax.shard_map, or make a "
            "Buffer for that mesh"
        )
    automatic = [axis for axis, size in mesh.shape.items() if size > 1 and axis not in manual]
    if automatic or unbound:
        raise EpUsageError(
            f"{op} needs the buffer's axes and every mesh axis larger than 1 to be manual, but "
            f"{automatic or unbound} are not: XLA's partitioner would run the call once "
            "for all of them; list every axis "
            "in jax.shard_map's axis_names, or leave axis_names out"
        )


def _check_dispatch_arrays(buffer: Buffer, x: Any, topk_idx: Any, topk_weights: Any) -> None:
    config = buffer.config
    num_tokens = _check_rows("x", x, config.dtype, "T", config.hidden)
    _check_num_tokens("x", num_tokens, config.max_tokens_per_rank)
    entries = (num_tokens, config.num_experts_per_tok)
    meaning = "[T, K] with x's T and the config's num_experts_per_tok"
    _check_array("topk_idx", topk_idx, np.dtype(np.int32), entries, meaning)
    _check_array("topk_weights", topk_weights, np.dtype(np.float32), entries, meaning)


def _check_num_tokens(name: str, num_tokens: int, most: int) -> None:
    if num_tokens > most:
        raise EpUsageError(
            f"{name} has {num_tokens} tokens on each rank, more than max_tokens_per_rank={most}; "
            "raise max_tokens_per_rank in the EpConfig, or split the call"
        )


def _check_routing(buffer: Buffer, topk_idx: Any, routing: Any) -> jax.Array:
    """Returns the routing's topk_idx."""
    if not isinstance(routing, Routing):
        raise EpUsageError(
            f"routing={routing!r} is a {type(routing).__name__}; pass what route returned, or the "
            "routing of a Notice"
        )
    if topk_idx is not None:
        raise EpUsageError(
            "dispatch was given topk_idx and a routing, which has one of its own; leave topk_idx "
            "out"
        )
    group = routing.group
    if (group.buffer_id, group.fingerprint) != (buffer.id, buffer.fingerprint):
        raise EpUsageError(
            f"routing was made by buffer {group.buffer_id}, not by buffer {buffer.id}; pass "
            "dispatch the buffer that routed"
        )
    shape, _ = _shape_and_dtype("routing.topk_idx", routing.topk_idx)
    int32 = np.dtype(np.int32)
    _check_array("routing.topk_idx", routing.topk_idx, int32, shape, "")
    _check_array("routing.row_index", routing.row_index, int32, shape, "that of routing.topk_idx")
    counts = (buffer.num_ranks, buffer.config.num_experts)
    meaning = "[R, E]; inside jax.shard_map a routing's arrays are split along their first axis"
    _check_array("routing.counts", routing.counts, int32, counts, meaning)
    return routing.topk_idx


def _check_combine_arrays(buffer: Buffer, y: Any, routed: Any) -> None:
    if not isinstance(routed, Routed):
        raise EpUsageError(
            f"routed={routed!r} is a {type(routed).__name__}; pass the Routed that dispatch "
            "returned"
        )
    layout = routed.handle.layout
    if (layout.buffer_id, layout.fingerprint) != (buffer.id, buffer.fingerprint):
        raise EpUsageError(
            f"routed was made by buffer {layout.buffer_id}, not by buffer {buffer.id}; "
            "pass combine the buffer that dispatched"
        )
    num_rows = _check_rows("y", y, buffer.config.dtype, "capacity", buffer.config.hidden)
    if num_rows != layout.capacity:
        field = "routed.tokens" if layout.expand else "routed.row_map"
        raise EpUsageError(
            f"y has {num_rows} rows, but {field} has capacity={layout.capacity}; "
            f"pass one output row for each row of {field}"
        )
    _check_array(
        "routed.weights", routed.weights, np.dtype(np.float32), (layout.capacity,), "[capacity]"
    )


def _check_rows(name: str, array: Any, dtype: np.dtype, first_axis: str, hidden: int) -> int:
    shape, _ = _shape_and_dtype(name, array)
    if len(shape) != 2 or shape[1] != hidden:
        raise EpUsageError(
            f"{name} has shape {shape}; pass [{first_axis}, {hidden}], {hidden} being the config's "
            "hidden"
        )
    _check_array(name, array, dtype, shape, "")
    return shape[0]


def _check_array(
    name: str, array: Any, dtype: np.dtype, shape: tuple[int, ...], meaning: str
) -> None:
    seen_shape, seen_dtype = _shape_and_dtype(name, array)
    if seen_shape != shape:
        raise EpUsageError(f"{name} has shape {seen_shape}; pass shape {shape}, which is {meaning}")
    if seen_dtype != dtype:
        raise EpUsageError(
            f"{name} has dtype {seen_dtype}; convert it with .astype({dtype.name!r})"
        )


def _shape_and_dtype(name: str, array: Any) -> tuple[tuple[int, ...], np.dtype]:
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise EpUsageError(f"{name}={array!r} is a {type(array).__name__}; pass an array")
    return tuple(array.shape), np.dtype(array.dtype)


def _layout(
    buffer: Buffer,
    num_tokens: int,
    capacity: Any,
    expert_alignment: Any,
    zero_tail: Any,
    expand: Any,
) -> RouteLayout:
    alignment = positive_int("expert_alignment", expert_alignment, at_most=MAX_CAPACITY)
    if capacity is None:
        per_token = min(buffer.config.num_experts_per_tok, buffer.experts_per_rank)
        most = buffer.num_ranks * num_tokens * per_token + buffer.experts_per_rank * (alignment - 1)
        rows = max(1, -(-most // alignment)) * alignment
    else:
        rows = positive_int("capacity", capacity)
    if rows > MAX_CAPACITY:
        raise EpUsageError(
            f"capacity={rows} rows do not fit into int32; pass a capacity of at most {MAX_CAPACITY}"
        )
    if rows % alignment:
        raise EpUsageError(
            f"capacity={rows} is not a multiple of expert_alignment={alignment}; "
            f"pass {-(-rows // alignment) * alignment}"
        )
    return RouteLayout(
        buffer_id=buffer.id,
        fingerprint=buffer.fingerprint,
        axis_names=buffer.axis_names,
        num_ranks=buffer.num_ranks,
        experts_per_rank=buffer.experts_per_rank,
        capacity=rows,
        expert_alignment=alignment,
        zero_tail=boolean("zero_tail", zero_tail),
        expand=boolean("expand", expand),
        target_suffix=buffer.target_suffix,
    )
