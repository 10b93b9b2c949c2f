"""Chains for GPUs, where ``chains``' loops would break the graphs that XLA records.

What links an operation to the next are its own results, or one number more.

A system of custom calls needs no more than a dependence: XLA cannot look into a call, nor merge two
with different operands, nor fuse them. Dispatch's checked ``topk_idx`` goes into the next dispatch,
and combine's result is the next tokens: such chains hold the calls and nothing else. Combines in a
row, and dispatches that are a start and its done, are linked by order tokens where the system has
them, else by a *touch*: 0, computed from one element of the result in a way that XLA cannot see
through, is added to the weights, in one small kernel.

Systems that XLA can look into are also cut by ``optimization_barrier``, which XLA:GPU keeps until
it has fused what it will: what is before one must exist in memory, and what is behind is not the
same as earlier. (Of a barrier's arrays it drops those that nobody uses; a touch uses them.) XLA:CPU
removes barriers early, so there these chains are good for tests, not for times.

Chains of many operations repeat one graph. In a program of N operations in a row, N also decides
how long the host takes to launch its graph, while the devices wait.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from .systems import Operations, System

GRAPH = 100  # operations


def _repeat(step: Callable, inputs, length: int):
    """``step(inputs) -> (inputs, results)`` so often; returns the last results.

    Where that is two graphs or more, these are a loop's turns: XLA records the body once, and the
    host, which knows how many turns there are, launches the next one during the last. The rest, one
    operation at least, comes behind the loop.
    """
    turns = (length - 1) // GRAPH
    if turns >= 2:
        inputs = lax.fori_loop(0, turns, lambda _, carry: _steps(step, carry, GRAPH)[0], inputs)
        length -= turns * GRAPH
    return _steps(step, inputs, length)[1]


def _steps(step: Callable, inputs, length: int):
    results = None
    for _ in range(length):
        inputs, results = step(inputs)
    return inputs, results


def touch(array: jax.Array, mark: jax.Array) -> jax.Array:
    """Adds mark, an int32 0, to a small array: one kernel, since nothing has to be in place."""
    return array + mark.astype(array.dtype)


def touch_first(array: jax.Array, mark: jax.Array) -> jax.Array:
    """Adds mark to the first element of a large array, in place if XLA can."""
    start = (0,) * array.ndim
    first = lax.slice(array, start, (1,) * array.ndim)
    return lax.dynamic_update_slice(array, touch(first, mark), start)


def mark_of(tree, never: jax.Array) -> jax.Array:
    """int32 0 that depends on every array; XLA cannot know, for ``never`` is an argument."""
    return sum(_bits(leaf) & never for leaf in jax.tree.leaves(tree) if leaf.size)


def _bits(array: jax.Array) -> jax.Array:
    first = lax.slice(array, (0,) * array.ndim, (1,) * array.ndim).reshape(())
    if jnp.issubdtype(array.dtype, jnp.floating):
        return lax.bitcast_convert_type(first.astype(jnp.float32), jnp.int32)
    return first.astype(jnp.int32)


@jax.custom_vjp
def _barrier(tree):
    return lax.optimization_barrier(tree)


_barrier.defvjp(
    lambda tree: (lax.optimization_barrier(tree), None),
    lambda _, cotangent: (lax.optimization_barrier(cotangent),),
)


def _cut(ops: Operations, tree):
    return tree if ops.opaque else _barrier(tree)


def _next_inputs(ops: Operations, x, topk_idx, topk_weights, results, never):
    """Inputs that are as before, but that XLA must take for others."""
    if ops.opaque:
        return x, topk_idx, topk_weights
    topk_weights = touch(topk_weights, mark_of(results, never))
    return _cut(ops, (x, topk_idx, topk_weights))


def dispatch(ops: Operations, inputs, never, length):
    """Dispatches; returns the last one's rows and group sizes."""

    def step(inputs):
        x, topk_idx, topk_weights = inputs
        sent = _cut(ops, ops.dispatch(x, topk_idx, topk_weights))
        if ops.opaque:
            topk_idx = ops.topk_idx(sent)
        return _next_inputs(ops, x, topk_idx, topk_weights, sent, never), sent

    def step_in_turn(carry):
        (x, topk_idx, topk_weights), token = carry
        sent = ops.dispatch_in_turn(x, topk_idx, topk_weights, token)
        return ((x, ops.topk_idx(sent), topk_weights), sent.token), sent

    if ops.dispatch_in_turn is not None:
        token = inputs[2].reshape(-1)[0].astype(jnp.float32)
        sent = _repeat(step_in_turn, (inputs, token), length)
    else:
        sent = _repeat(step, inputs, length)
    return ops.rows(sent), sent.group_sizes


def combine(ops: Operations, inputs, never, length):
    """One dispatch, and combines of its rows; returns the last one's sums."""

    def step(carry):
        y, sent = carry
        if ops.combine_in_turn is not None:
            out, sent = ops.combine_in_turn(y, sent)
            return (y, sent), out
        out = _cut(ops, ops.combine(y, sent))
        mark = mark_of(out, never)
        if dataclasses.is_dataclass(sent) and hasattr(sent, "weights"):
            sent = dataclasses.replace(sent, weights=touch(sent.weights, mark))
        else:
            y = touch_first(y, mark)
        return _cut(ops, (y, sent)), out

    sent = _cut(ops, ops.dispatch(*inputs))
    return _repeat(step, (sent.tokens, sent), length)


def roundtrip(ops: Operations, inputs, never, length):
    """Dispatches and combines in turn; experts change nothing."""

    def step(inputs):
        x, topk_idx, topk_weights = inputs
        sent = ops.dispatch(x, topk_idx, topk_weights)
        x = _cut(ops, ops.combine(_cut(ops, sent.tokens), sent))
        results = (x, sent.group_sizes)
        return _next_inputs(ops, x, topk_idx, topk_weights, results, never), x

    return _repeat(step, inputs, length)


def fwd_bwd(ops: Operations, inputs, never, length):
    """Gradients of half the outputs' sum of squares, whose cotangents are the outputs."""

    def step(inputs):
        x, topk_idx, topk_weights = inputs

        def layer(x, topk_weights):
            sent = ops.dispatch(x, topk_idx, topk_weights)
            return ops.combine(_cut(ops, sent.tokens), sent)

        out, pull_back = jax.vjp(layer, x, topk_weights)
        x, d_weights = _cut(ops, pull_back(_cut(ops, out)))
        results = (x, d_weights)
        return _next_inputs(ops, x, topk_idx, topk_weights, results, never), x

    return _repeat(step, inputs, length)


def notify(ops: Operations, inputs, never, length):
    """Exchanges of counts; returns x."""

    def step(topk_idx):
        topk_idx = ops.notify(topk_idx)
        return topk_idx, topk_idx

    x, topk_idx, _ = inputs
    return touch_first(x, mark_of(_repeat(step, topk_idx, length), never))


def glue(ops: Operations, inputs, never, length):
    """Touches alone, one behind the other."""

    def step(topk_weights):
        topk_weights = _barrier(touch(topk_weights, mark_of(topk_weights, never)))
        return topk_weights, topk_weights

    x, _, topk_weights = inputs
    return touch_first(x, mark_of(_repeat(step, topk_weights, length), never))


def has_glue(op: str, system: System) -> bool:
    """Whether a chain's operation holds a touch besides the system's own work."""
    return not system.opaque or (op == "combine" and not system.in_turn)
