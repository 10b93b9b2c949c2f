"""vmap makes one call after another, inside and outside shard_map, and keeps gradients."""

import dataclasses

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import programs
import pytest
from jax.sharding import PartitionSpec

import jax_ep

CASE = cases.Case(name="vmap", T=4, H=16, K=2, E=8, R=4)
SLOTS = dataclasses.replace(CASE, name="vmap_slots", expand=False)
BATCH = 3


def layer_on(buffer, case=CASE):
    """Rows times the number of their expert, so that routing matters; ragged_dot has no vmap."""

    def layer(x, topk_idx, topk_weights):
        routed = programs.dispatch(buffer, case, x, topk_idx, topk_weights)
        rows = programs.expert_rows(routed)
        first = jax.lax.axis_index("expert") * CASE.experts_per_rank
        ends = jnp.cumsum(routed.group_sizes)
        row = jnp.arange(rows.shape[0])
        expert = first + jnp.sum(row[:, None] >= ends[None, :], axis=1)
        return jax_ep.combine(buffer, rows * (1.0 + expert[:, None]), routed)

    return layer


def problem(rng):
    """A batch of inputs with the gradients and outputs that each member must have."""
    members = [cases.make_inputs(CASE, rng) for _ in range(BATCH)]
    g = rng.normal(size=(BATCH, CASE.R * CASE.T, CASE.H)).astype(np.float32)
    matrices = np.eye(CASE.H) * np.arange(1, CASE.E + 1)[:, None, None]
    dense = [
        oracle.dense_moe(m.x, m.topk_idx, m.topk_weights, matrices, each)
        for m, each in zip(members, g, strict=True)
    ]
    stacked = [
        np.stack([getattr(m, f) for m in members]) for f in ("x", "topk_idx", "topk_weights")
    ]
    return stacked, g, dense


@pytest.mark.parametrize("case", [CASE, SLOTS], ids=lambda case: case.name)
@pytest.mark.parametrize(
    ("backend", "place"), [("reference", "inside"), ("native", "inside"), ("native", "outside")]
)
def test_batched_everything_with_gradients(backend, rng, place, case):
    (x, topk_idx, topk_weights), g, dense = problem(rng)
    with programs.make_buffer(CASE, backend) as buffer:
        layer = layer_on(buffer, case)
        if place == "inside":
            spec = PartitionSpec(None, "expert")
            run = programs.sharded(buffer, jax.vmap(layer), in_specs=spec, out_specs=spec)
        else:
            run = jax.vmap(programs.sharded(buffer, layer))

        def loss(x, topk_weights):
            out = run(x, topk_idx, topk_weights)
            return jnp.sum(g * out), out

        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        (_, out), (d_x, d_weights) = jax.block_until_ready(step(x, topk_weights))
    for member, truth in enumerate(dense):
        np.testing.assert_allclose(out[member], truth.out, rtol=0, atol=1e-4)
        np.testing.assert_allclose(d_x[member], truth.d_x, rtol=0, atol=1e-4)
        np.testing.assert_allclose(d_weights[member], truth.d_topk_weights, rtol=0, atol=2e-4)


def test_batch_of_rows_on_one_routing(rng):
    """Only x is batched; the routing is every member's."""
    (x, topk_idx, topk_weights), _, _ = problem(rng)
    with programs.make_buffer(CASE, "native") as buffer:
        layer = layer_on(buffer)

        def batched(x, topk_idx, topk_weights):
            return jax.vmap(layer, in_axes=(0, None, None))(x, topk_idx, topk_weights)

        many, one = PartitionSpec(None, "expert"), PartitionSpec("expert")
        run = programs.sharded(buffer, batched, in_specs=(many, one, one), out_specs=many)
        out = jax.jit(run)(x, topk_idx[0], topk_weights[0])
        single = jax.jit(programs.sharded(buffer, layer))
        for member in range(BATCH):
            expected = single(x[member], topk_idx[0], topk_weights[0])
            np.testing.assert_array_equal(out[member], expected)
