"""Programs around notify_dispatch, route and dispatch along a routing, shared by their tests."""

import functools

import cases
import jax
import numpy as np
import oracle
import programs
from jax.sharding import NamedSharding, PartitionSpec

import jax_ep


def on_mesh(buffer: jax_ep.Buffer, *arrays) -> list[jax.Array]:
    """Arrays of all ranks, split over the buffer's mesh."""
    everywhere = NamedSharding(buffer.mesh, PartitionSpec(buffer.mesh.axis_names))
    return [jax.device_put(array, everywhere) for array in arrays]


def true_counts(topk_idx: np.ndarray, case: cases.Case) -> np.ndarray:
    """Rows of every source for every expert, ``[R, E]``, of topk_idx ``[R * T, K]``."""
    clean, _, _ = oracle.clean(topk_idx.reshape(case.R, -1, case.K), case.E)
    return np.stack([np.bincount(of[of >= 0], minlength=case.E) for of in clean])


def true_sizes(topk_idx: np.ndarray, case: cases.Case) -> np.ndarray:
    """Rows that each rank receives for each of its experts, ``[R, E_l]``."""
    return true_counts(topk_idx, case).sum(axis=0).reshape(case.R, case.experts_per_rank)


def routed_dispatch(buffer, case: cases.Case, x, routing, topk_weights, **options) -> jax_ep.Routed:
    """Dispatch along a routing with the case's options, and others."""
    return jax_ep.dispatch(
        buffer,
        x,
        topk_weights=topk_weights,
        routing=routing,
        capacity=case.capacity,
        expert_alignment=case.alignment,
        zero_tail=case.zero_tail,
        expand=case.expand,
        **options,
    )


def right_sized_step(buffer: jax_ep.Buffer):
    """Jitted ``step(x, routing, topk_weights, capacity=...)``: sum of weighted rows, and drops."""

    @functools.partial(jax.jit, static_argnames="capacity")
    def step(x, routing, topk_weights, capacity):
        def layer(x, routing, topk_weights):
            routed = jax_ep.dispatch(
                buffer, x, topk_weights=topk_weights, routing=routing, capacity=capacity
            )
            return jax_ep.combine(buffer, routed.tokens, routed), routed.num_dropped[None]

        return programs.sharded(buffer, layer)(x, routing, topk_weights)

    return step
