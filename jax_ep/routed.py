"""What dispatch returns: pytrees of arrays that pass through jit, scan, checkpoint and donation."""

import dataclasses
import functools

import jax


@dataclasses.dataclass(frozen=True)
class Float8:
    """How a dispatch quantises rows to float8 for the way.

    Attributes:
        scale_format: "float32" or "power_of_two".
        dequantize: whether rows come back, not values and scales.
    """

    scale_format: str
    dequantize: bool


@dataclasses.dataclass(frozen=True)
class RouteLayout:
    """Static facts of one dispatch that its combine and its gradients need; hashable, and holds no
    Buffer.

    Attributes:
        buffer_id, fingerprint: identity of the buffer that dispatched.
        axis_names: the mesh axes along which the experts are split.
        num_ranks: R.
        experts_per_rank: E_l.
        capacity: expert-major rows, those of ``weights``.
        expert_alignment: A; every expert's segment is a multiple of A rows.
        zero_tail: whether rows past the last segment are zero (otherwise unspecified).
        expand: whether ``tokens`` are expert-major rows (otherwise slots).
        float8: how dispatch quantised rows; None: they travelled as they were.
        target_suffix: what the names of the buffer's native targets end with.
    """

    buffer_id: int
    fingerprint: int
    axis_names: tuple[str, ...]
    num_ranks: int
    experts_per_rank: int
    capacity: int
    expert_alignment: int
    zero_tail: bool
    expand: bool
    float8: Float8 | None = None
    target_suffix: str = ""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("topk_idx", "recv_rows"),
    meta_fields=("layout",),
)
@dataclasses.dataclass(frozen=True)
class Handle:
    """Where every row came from and where it went: integers only.

    Attributes:
        topk_idx: int32 ``[T, K]``, this rank's experts; entries that name no expert, or one twice,
            are -1.
        recv_rows: int32 ``[R * T, K]``: expert-major row of entry k of token t of source rank s, at
            ``[s * T + t, k]``; -1 where that expert is not on this rank, or where the row was
            dropped.
        layout: static facts.
    """

    topk_idx: jax.Array
    recv_rows: jax.Array
    layout: RouteLayout


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        "tokens",
        "weights",
        "group_sizes",
        "valid_sizes",
        "num_dropped",
        "row_map",
        "handle",
        "scales",
    ),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class Routed:
    """The tokens that a rank's experts received. Use ``dataclasses.replace`` to edit a field.

    *Expert-major* rows: one segment of rows per local expert, in order; inside a segment ordered by
    source rank, then token, then k.

    Attributes:
        tokens: ``[capacity, H]`` in the buffer's dtype, expert-major. With ``expand=False``
            ``[R * T, H]``: each token once, token t of source rank s in slot ``s * T + t``; slots
            of which no row is on this rank, or of which all were dropped, are zero. Float8 values
            if quantised and not dequantised.
        weights: float32 ``[capacity]``, the entries' ``topk_weights``; 0 for rows that hold no
            token. ``combine`` multiplies by them, so editing them changes its result, and gradients
            flow through them.
        group_sizes: int32 ``[E_l]``, rows in each segment that fit into ``capacity``, alignment
            rows included: the group sizes for ``jax.lax.ragged_dot``.
        valid_sizes: int32 ``[E_l]``, rows of each segment that hold a token; equal to
            ``group_sizes`` when ``expert_alignment`` is 1.
        num_dropped: int32 scalar, rows of this rank that did not fit into ``capacity``.
        row_map: with ``expand=False`` int32 ``[capacity]``, the slot in ``tokens`` of every
            expert-major row, and ``R * T`` for rows that hold no token, so that
            ``tokens.at[row_map].get(mode="fill", fill_value=0)`` are the expert-major rows;
            otherwise None.
        handle: what ``combine`` needs to send the rows back.
        scales: float32 ``[rows of tokens, ceil(H / 128)]`` where tokens are float8 values: channel
            h of row r stands for ``tokens[r, h] * scales[r, h // 128]``; 1 in rows of zeros.
            Otherwise None.
    """

    tokens: jax.Array
    weights: jax.Array
    group_sizes: jax.Array
    valid_sizes: jax.Array
    num_dropped: jax.Array
    row_map: jax.Array | None
    handle: Handle
    scales: jax.Array | None = None
