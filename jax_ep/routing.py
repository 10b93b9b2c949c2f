"""What route and notify_dispatch return: who sends how many rows to whom, without the rows."""

import dataclasses
import functools

import jax


@dataclasses.dataclass(frozen=True)
class RoutingGroup:
    """Static facts of a routing; hashable, and holds no Buffer.

    Attributes:
        buffer_id, fingerprint: identity of the buffer that routed.
        axis_names: the mesh axes along which the experts are split.
        num_ranks: R.
        experts_per_rank: E_l.
        target_suffix: what the names of the buffer's native targets end with.
    """

    buffer_id: int
    fingerprint: int
    axis_names: tuple[str, ...]
    num_ranks: int
    experts_per_rank: int
    target_suffix: str = ""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("topk_idx", "row_index", "counts"),
    meta_fields=("group",),
)
@dataclasses.dataclass(frozen=True)
class Routing:
    """Where a rank's tokens go, and how many rows all ranks get: integers only.

    ``dispatch(..., routing=...)`` needs no exchange of counts, any number of times. What depends on
    a capacity is not in it. Shapes are those of one rank; outside ``jax.shard_map`` every array is
    split along its first axis as ``PartitionSpec(mesh.axis_names)`` says.

    Attributes:
        topk_idx: int32 ``[T, K]``, this rank's experts; entries that name no expert, or one twice,
            are -1.
        row_index: int32 ``[T, K]``, the entry's place among this rank's entries for its expert; -1
            where ``topk_idx`` is.
        counts: int32 ``[R, E]``, rows of every source rank for every expert of the group; the same
            on all ranks.
        group: static facts.
    """

    topk_idx: jax.Array
    row_index: jax.Array
    counts: jax.Array
    group: RoutingGroup
