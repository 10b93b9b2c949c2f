"""Programs of N operations in a row, from which a timer takes the cost of one as a slope.

The chains here, of style "loop", are for CPUs. Those for GPUs, of style "data", are in ``linked``.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from . import linked
from .systems import Operations
from .workload import AXIS


def opaque(tree, never: jax.Array):
    """The tree itself, through a loop that XLA cannot know to make no turn.

    Every array must then exist in memory, and every result depends on every argument, so XLA
    neither merges, hoists nor drops the operations before and after, nor fuses one into the other.
    (XLA:CPU of jax 0.10 removes an optimization_barrier before it fuses.) The loop's body would
    change one element of every array in place, so nothing is copied.

    Args:
        tree: arrays that vary over the mesh, at least one element each.
        never: int32 0, an argument of the compiled program.
    """
    leaves, structure = jax.tree.flatten(tree)

    def body(carry):
        turn, leaves = carry
        mark = sum(_first(leaf).reshape(()).astype(jnp.float32) for leaf in leaves)
        return turn + 1, [_with_first(leaf, mark) for leaf in leaves]

    turns = jnp.zeros_like(never)
    _, leaves = lax.while_loop(lambda carry: carry[0] < never, body, (turns, leaves))
    return jax.tree.unflatten(structure, leaves)


def _first(array: jax.Array) -> jax.Array:
    return lax.slice(array, (0,) * array.ndim, (1,) * array.ndim)


def _with_first(array: jax.Array, number: jax.Array) -> jax.Array:
    update = jnp.broadcast_to(number.astype(array.dtype), (1,) * array.ndim)
    return lax.dynamic_update_slice(array, update, (0,) * array.ndim)


@jax.custom_vjp
def experts(rows: jax.Array, never: jax.Array) -> jax.Array:
    """In place of the experts: changes nothing, costs nothing, and nothing is fused across it."""
    return opaque(rows, never)


experts.defvjp(
    lambda rows, never: (opaque(rows, never), never),
    lambda never, cotangent: (opaque(cotangent, never), None),
)


def _dispatch(ops: Operations, inputs, never, length):
    for _ in range(length):
        inputs, _ = opaque((inputs, ops.dispatch(*inputs)), never)
    return inputs[0]


def _combine(ops: Operations, inputs, never, length):
    sent = opaque(ops.dispatch(*inputs), never)
    for _ in range(length):
        sent, out = opaque((sent, ops.combine(sent.tokens, sent)), never)
    return out


def _roundtrip(ops: Operations, inputs, never, length):
    for _ in range(length):
        sent = ops.dispatch(*inputs)
        y, group_sizes = opaque((sent.tokens, sent.group_sizes), never)
        out = ops.combine(y, sent)
        (*inputs, _) = opaque((out, *inputs[1:], group_sizes), never)
    return inputs[0]


def _fwd_bwd(ops: Operations, inputs, never, length):
    """Gradients of half the outputs' sum of squares: a plain sum's cotangent is a constant.

    XLA could fold a constant into a baseline's gathers.
    """
    x, topk_idx, topk_weights = inputs
    for _ in range(length):

        def layer(x, topk_weights, topk_idx=topk_idx):
            sent = ops.dispatch(x, topk_idx, topk_weights)
            return ops.combine(experts(sent.tokens, never), sent)

        out, pull_back = jax.vjp(layer, x, topk_weights)
        d_x, d_weights = pull_back(experts(out, never))
        x, topk_idx, topk_weights, _ = opaque((d_x, topk_idx, topk_weights, d_weights), never)
    return x


def _notify(ops: Operations, inputs, never, length):
    x, topk_idx, _ = inputs
    for _ in range(length):
        topk_idx = opaque(ops.notify(topk_idx), never)
    return opaque((x, topk_idx), never)[0]


def _glue(ops: Operations, inputs, never, length):
    """What chaining alone costs: dispatch's chain, an array of its results' shapes in its place."""
    number = _first(inputs[0]).reshape(())
    sent = jax.tree.map(
        lambda leaf: jnp.full(leaf.shape, number.astype(leaf.dtype)),
        jax.eval_shape(ops.dispatch, *inputs),
    )
    for _ in range(length):
        inputs, sent = opaque((inputs, sent), never)
    return inputs[0]


@dataclasses.dataclass(frozen=True)
class Chain:
    """A chain.

    Attributes:
        build: ``(ops, inputs, never, length) -> results``, inside ``jax.shard_map``.
        parts: which of a system's calls one operation makes.
        returns_rows: whether the results are the rows and group sizes of the last dispatch;
            otherwise they are x again.
    """

    build: Callable
    parts: tuple[str, ...]
    returns_rows: bool = False


PARTS = {
    "dispatch": ("dispatch",),
    "combine": ("combine",),
    "roundtrip": ("dispatch", "combine"),
    "fwd_bwd": ("dispatch", "combine", "backward"),
    "notify": ("notify",),
    "glue": (),
}

CHAINS = {
    "loop": {
        "dispatch": Chain(_dispatch, PARTS["dispatch"]),
        "combine": Chain(_combine, PARTS["combine"]),
        "roundtrip": Chain(_roundtrip, PARTS["roundtrip"]),
        "fwd_bwd": Chain(_fwd_bwd, PARTS["fwd_bwd"]),
        "notify": Chain(_notify, PARTS["notify"]),
        "glue": Chain(_glue, PARTS["glue"]),
    },
    "data": {
        "dispatch": Chain(linked.dispatch, PARTS["dispatch"], returns_rows=True),
        "combine": Chain(linked.combine, PARTS["combine"]),
        "roundtrip": Chain(linked.roundtrip, PARTS["roundtrip"]),
        "fwd_bwd": Chain(linked.fwd_bwd, PARTS["fwd_bwd"]),
        "notify": Chain(linked.notify, PARTS["notify"]),
        "glue": Chain(linked.glue, PARTS["glue"]),
    },
}


def compile_chain(
    chain: Chain, ops: Operations, mesh: Mesh, args, length: int
) -> jax.stages.Compiled:
    """Compiles ``length`` operations in a row.

    Args:
        chain: one of ``CHAINS``.
        ops: the system.
        mesh: as many devices as ranks.
        args: x, topk_idx, topk_weights, all ranks stacked, and ``never``.
        length: at least 1.
    """
    split = PartitionSpec(AXIS)

    def program(x, topk_idx, topk_weights, never):
        return chain.build(ops, (x, topk_idx, topk_weights), never, length)

    sharded = jax.shard_map(
        program, mesh=mesh, in_specs=(split, split, split, PartitionSpec()), out_specs=split
    )
    return jax.jit(sharded).lower(*args).compile()
