"""route: the counts of a dispatch ahead of it, inside jit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _reference, _vjp
from ._order import hold
from ._primitives import NO_TICKET, cast_varying
from .buffer import Buffer
from .errors import EpUsageError
from .ops import _check_array, _check_num_tokens, _check_place, _shape_and_dtype
from .routing import Routing, RoutingGroup


def route(buffer: Buffer, topk_idx: jax.Array, *, after: Any = None) -> Routing:
    """Exchanges the counts of a dispatch ahead of it; call it inside ``jax.shard_map``.

    ``dispatch(..., routing=routing)`` then exchanges none, any number of times. All ranks of the
    group must make the call, with the same shapes. Pure. ``notify_dispatch`` is the same outside
    ``jax.jit``, for a host that wants to know the counts.

    Args:
        buffer: an open Buffer made for the mesh that ``jax.shard_map`` runs over.
        topk_idx: int32 ``[T, K]`` as for ``dispatch``; faults are recorded here and no more in
            dispatches that use the routing.
        after: as in ``dispatch``.

    Returns:
        A Routing.

    Raises:
        EpUsageError: an argument does not fit, the buffer is closed or its backend offers no
            routings, or the call is not inside ``jax.shard_map`` over the buffer's mesh with all
            its axes larger than 1 manual.
    """
    _check_place("route", buffer)
    require_routings("route", buffer)
    check_topk_idx(buffer, topk_idx, 1)
    ticket = jnp.full((), NO_TICKET, jnp.uint32)
    return routing_of(buffer.backend, routing_group(buffer), jnp.asarray(topk_idx), ticket, after)


def routing_of(
    backend_name: str,
    group: RoutingGroup,
    topk_idx: jax.Array,
    ticket: jax.Array,
    after: Any = None,
) -> Routing:
    """Route without a Buffer, for programs that must not keep one alive."""
    topk_idx = hold("route", group.axis_names, topk_idx, after)
    topk_idx, ticket = cast_varying(group.axis_names, topk_idx, ticket)
    backend = _reference if backend_name == "reference" else _vjp
    topk_idx, row_index, counts = backend.route(group, topk_idx, ticket)
    return Routing(topk_idx=topk_idx, row_index=row_index, counts=counts, group=group)


def routing_group(buffer: Buffer) -> RoutingGroup:
    """The buffer's identity in its routings."""
    return RoutingGroup(
        buffer_id=buffer.id,
        fingerprint=buffer.fingerprint,
        axis_names=buffer.axis_names,
        num_ranks=buffer.num_ranks,
        experts_per_rank=buffer.experts_per_rank,
        target_suffix=buffer.target_suffix,
    )


def require_routings(op: str, buffer: Buffer) -> None:
    """Raises EpUsageError if the buffer's mode has no routings, or its native module no targets."""
    if buffer.config.mode != "high_throughput":
        raise EpUsageError(
            f"{op} was given buffer {buffer.id} of mode={buffer.config.mode!r}, which exchanges no "
            "counts ahead; make another Buffer with EpConfig(mode='high_throughput')"
        )
    module = buffer.native_module
    if module is not None and not hasattr(module, "read_notice"):
        raise EpUsageError(
            f"{op} is not offered by {module.__name__} in this version; make the Buffer with "
            "backend='reference', or call dispatch with topk_idx"
        )


def check_topk_idx(buffer: Buffer, topk_idx: Any, num_parts: int) -> None:
    """Requires int32 ``[num_parts * T, K]``, T within the config's limit."""
    config = buffer.config
    shape, _ = _shape_and_dtype("topk_idx", topk_idx)
    rows = shape[0] if shape else 0
    meaning = "[T, K] with the config's num_experts_per_tok"
    if num_parts > 1:
        meaning += f", T of each of {num_parts} devices along the first axis"
    whole_parts = (-(-rows // num_parts) * num_parts, config.num_experts_per_tok)
    _check_array("topk_idx", topk_idx, np.dtype(np.int32), whole_parts, meaning)
    _check_num_tokens("topk_idx", rows // num_parts, config.max_tokens_per_rank)
