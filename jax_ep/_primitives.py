"""One function per native target, around ``jax.ffi.ffi_call``. No gradients here."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from . import _float8
from .routed import RouteLayout
from .routing import RoutingGroup

NO_TICKET = 0  # of a routing whose counts the host does not wait for


def cast_varying(axis_names: tuple[str, ...], *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Casts arrays to one type of device variance: the union of theirs and ``axis_names``.

    Under ``check_vma=True`` all operands of a custom call must vary over the same mesh axes. The
    transpose of the cast sums cotangents over the axes it added, so differentiable arrays are cast
    outside a custom_vjp. Under ``check_vma=False`` nothing carries such a type, which shows in
    ``axis_index``'s, and nothing is cast.
    """
    if not _varying(lax.axis_index(axis_names)):
        return arrays
    axes = frozenset(axis_names).union(*map(_varying, arrays))
    return tuple(_cast(array, axes) for array in arrays)


def dispatch(layout: RouteLayout, x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array):
    """Target ``jax_ep_dispatch``; operands and results as in ``_reference.dispatch``."""
    rows, recv_rows = _dispatch_results(layout, x, topk_idx)
    sanitised = (topk_idx.shape, jnp.int32)
    operands = (x, topk_idx, topk_weights)
    return _call_dispatch("jax_ep_dispatch", layout, operands, (*rows, sanitised, *recv_rows))


def dispatch_routed(
    layout: RouteLayout,
    x: jax.Array,
    topk_idx: jax.Array,
    row_index: jax.Array,
    counts: jax.Array,
    topk_weights: jax.Array,
):
    """Target ``jax_ep_dispatch_routed``: ``dispatch`` along a routing, without exchanging counts.

    Args:
        layout: static facts of the call.
        x: ``[T, H]``.
        topk_idx, row_index, counts: as in Routing.
        topk_weights: float32 ``[T, K]``.

    Returns:
        The results of ``dispatch``, ``topk_idx`` in the place of the sanitised one.
    """
    rows, recv_rows = _dispatch_results(layout, x, topk_idx)
    operands = (x, topk_idx, row_index, counts, topk_weights)
    *arrays, recv_rows, row_map = _call_dispatch(
        "jax_ep_dispatch_routed", layout, operands, (*rows, *recv_rows)
    )
    return *arrays, topk_idx, recv_rows, row_map


def route(group: RoutingGroup, topk_idx: jax.Array, ticket: jax.Array):
    """Target ``jax_ep_notify``: exchanges counts.

    Args:
        group: static facts of the call.
        topk_idx: int32 ``[T, K]``.
        ticket: uint32 scalar. Unless it is NO_TICKET, the host finds the counts under it while the
            device goes on.

    Returns:
        sanitised topk_idx int32 ``[T, K]``, row_index int32 ``[T, K]``, counts int32 ``[R, E]``, as
        in Routing.
    """
    num_experts = group.num_ranks * group.experts_per_rank
    results = (
        (topk_idx.shape, jnp.int32),
        (topk_idx.shape, jnp.int32),
        ((group.num_ranks, num_experts), jnp.int32),
    )
    return _call("jax_ep_notify", group, (topk_idx, ticket), results)


def combine(
    layout: RouteLayout, y: jax.Array, weights: jax.Array, topk_idx: jax.Array, recv_rows: jax.Array
):
    """Target ``jax_ep_combine``, weighted, without scalars; as ``_reference.combine``."""
    out, _ = _combine(layout, y, weights, _empty(y), topk_idx, recv_rows, expanded=True)
    return out


def combine_with_scalars(
    layout: RouteLayout,
    y: jax.Array,
    row_scalars: jax.Array,
    topk_idx: jax.Array,
    recv_rows: jax.Array,
):
    """Target ``jax_ep_combine``, unweighted, one float32 scalar of every row sent along.

    Args:
        layout: static facts of the dispatch; ``expand`` tells which of the two shapes y has.
        y: ``[capacity, H]``, expert-major, or ``[R * T, H]``, one row for each slot.
        row_scalars: float32 ``[capacity]``.
        topk_idx: int32 ``[T, K]``.
        recv_rows: int32 ``[R * T, K]``.

    Returns:
        ``[T, H]``, the plain sum of a token's rows (of its slots on the ranks that kept any of its
        rows), and float32 ``[T, K]``, the scalar of entry (t, k)'s row, 0 where there is none.
    """
    return _combine(layout, y, _empty(y), row_scalars, topk_idx, recv_rows, expanded=layout.expand)


def combine_grad(
    layout: RouteLayout,
    g: jax.Array,
    topk_idx: jax.Array,
    recv_rows: jax.Array,
    weights: jax.Array,
    y: jax.Array,
):
    """Target ``jax_ep_combine_grad``: sends tokens' cotangents along a saved route.

    Args:
        layout: static facts of the dispatch.
        g: ``[T, H]``, cotangent of combine's result.
        topk_idx: int32 ``[T, K]``.
        recv_rows: int32 ``[R * T, K]``.
        weights: float32 ``[capacity]``.
        y: ``[capacity, H]``.

    Returns:
        ``weights[row] * g[token of row]`` as ``[capacity, H]``, and the float32 products
        ``<y[row], g[token of row]>`` as ``[capacity]``.
    """
    results = ((y.shape, y.dtype), (weights.shape, jnp.float32))
    return _call(
        "jax_ep_combine_grad",
        layout,
        (g, topk_idx, recv_rows, weights, y),
        results,
        expert_alignment=layout.expert_alignment,
        zero_tail=layout.zero_tail,
    )


def _dispatch_results(layout: RouteLayout, x: jax.Array, topk_idx: jax.Array):
    """Shapes and dtypes of tokens to num_dropped, and of recv_rows and row_map."""
    num_tokens, num_experts_per_tok = topk_idx.shape
    num_slots = layout.num_ranks * num_tokens
    rows = (
        ((layout.capacity if layout.expand else num_slots, x.shape[1]), x.dtype),
        ((layout.capacity,), jnp.float32),
        ((layout.experts_per_rank,), jnp.int32),
        ((layout.experts_per_rank,), jnp.int32),
        ((), jnp.int32),
    )
    recv_rows = (
        ((num_slots, num_experts_per_tok), jnp.int32),
        ((0 if layout.expand else layout.capacity,), jnp.int32),
    )
    return rows, recv_rows


def _call_dispatch(target: str, layout: RouteLayout, operands, results):
    """The target's results with ``layout.float8``'s pair in the place of rows."""
    float8 = layout.float8
    if float8 is not None:
        tokens, *scales = _float8.token_results(float8, *results[0])
        packed = _float8.packed_result(operands[0].shape)
        results = (tokens, *(scales or [((0,), jnp.float32)]), *results[1:], packed)
    tokens, *arrays = _call(
        _float8.target(target, float8),
        layout,
        operands,
        results,
        expert_alignment=layout.expert_alignment,
        zero_tail=layout.zero_tail,
        expanded=layout.expand,
        **_float8.attributes(float8),
    )
    if float8 is not None:
        scales, *arrays, _ = arrays
        tokens = tokens if float8.dequantize else (tokens, scales)
    *arrays, row_map = arrays
    return tokens, *arrays, None if layout.expand else row_map


def _combine(layout, y, weights, row_scalars, topk_idx, recv_rows, *, expanded):
    weighted, with_scalars = weights.size > 0, row_scalars.size > 0
    results = (
        ((topk_idx.shape[0], y.shape[1]), y.dtype),
        (topk_idx.shape if with_scalars else (0,), jnp.float32),
    )
    operands = (y, weights, row_scalars, topk_idx, recv_rows)
    return _call(
        "jax_ep_combine",
        layout,
        operands,
        results,
        weighted=weighted,
        with_scalars=with_scalars,
        expanded=expanded,
    )


def _call(target: str, layout: RouteLayout | RoutingGroup, operands, results, **attributes: int):
    rank = lax.axis_index(layout.axis_names)
    operands = cast_varying(layout.axis_names, rank, *operands)
    call = jax.ffi.ffi_call(
        target + layout.target_suffix,
        [_result_type(shape, dtype, operands[0]) for shape, dtype in results],
        has_side_effect=False,
        vmap_method="sequential",
    )
    attributes |= {"buffer_id": layout.buffer_id, "fingerprint": layout.fingerprint}
    return call(*operands, **{name: np.int64(value) for name, value in attributes.items()})


def _result_type(shape: tuple[int, ...], dtype, operand: jax.Array) -> jax.ShapeDtypeStruct:
    """A result's type; under ``check_vma=True`` it varies over the same axes as the operands."""
    if not _varying(operand):
        return jax.ShapeDtypeStruct(shape, dtype)
    unsharded = PartitionSpec(*(None for _ in shape))
    return jax.ShapeDtypeStruct(
        shape,
        dtype,
        sharding=NamedSharding(jax.sharding.get_abstract_mesh(), unsharded),
        manual_axis_type=jax.typeof(operand).manual_axis_type,
    )


def _varying(array: jax.Array) -> frozenset[str]:
    return frozenset(jax.typeof(array).manual_axis_type.varying)


def _cast(array: jax.Array, axes: frozenset[str]) -> jax.Array:
    missing = tuple(sorted(axes - _varying(array)))
    return lax.pcast(array, missing, to="varying") if missing else array


def _empty(like: jax.Array) -> jax.Array:
    """An operand that the call's attributes declare absent."""
    return jnp.zeros_like(like, shape=(0,), dtype=jnp.float32)
