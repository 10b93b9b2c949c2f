"""Groups inside larger meshes: sub-axes, tuples of axes in any order, nested shard_maps."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import programs
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_ep

P = PartitionSpec


def run_layer(buffer, case, arguments, *, rows, experts):
    """Value and gradients of a linear layer; ``rows`` and ``experts`` are partition specs."""
    x, topk_idx, topk_weights, matrices, g = arguments
    layer = programs.sharded(
        buffer,
        programs.linear_moe(buffer, case),
        in_specs=(rows, rows, rows, experts),
        out_specs=rows,
    )

    def loss(x, topk_weights, matrices):
        out = layer(x, topk_idx, topk_weights, matrices)
        return jnp.sum(g * out), out

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))
    (_, out), gradients = step(x, topk_weights, matrices)
    return out, gradients


def random_problem(rng, num_shards, num_tokens, num_experts):
    """Arguments for tokens split ``num_shards`` ways, and the truth, which knows no groups."""
    case = cases.Case(name="nested", T=num_tokens, H=16, K=2, E=num_experts, R=num_shards)
    inputs, matrices = cases.make_inputs(case, rng), programs.random_matrices(rng, case)
    g = rng.normal(size=inputs.x.shape).astype(np.float32)
    arguments = (inputs.x, inputs.topk_idx, inputs.topk_weights, matrices, g)
    return case, arguments, oracle.dense_moe(*arguments)


def assert_matches(results, dense):
    out, gradients = results
    np.testing.assert_allclose(out, dense.out, rtol=0, atol=1e-5)
    truths = (dense.d_x, dense.d_topk_weights, dense.d_matrices)
    for seen, truth in zip(gradients, truths, strict=True):
        np.testing.assert_allclose(seen, truth, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("backend", "order"),
    [
        ("reference", ("data", "expert")),
        ("native", ("data", "expert")),
        ("native", ("expert", "data")),
    ],
    ids=str,
)
def test_sub_axis_makes_a_group_for_each_position(backend, rng, order):
    """Experts split 4 ways and kept twice; tokens split 8 ways; d_matrices sums both groups."""
    sizes = {"data": 2, "expert": 4}
    case, arguments, dense = random_problem(rng, 8, 5, 8)
    mesh = programs.make_mesh(**{axis: sizes[axis] for axis in order})
    config = programs.make_config(case)
    with jax_ep.Buffer(mesh, "expert", config, backend=backend) as buffer:
        assert buffer.num_ranks == 4
        results = run_layer(buffer, case, arguments, rows=P(order), experts=P("expert"))
        assert_matches(results, dense)


@pytest.mark.parametrize(
    ("backend", "axes"),
    [("reference", ("b", "a")), ("native", ("a", "b")), ("native", ("b", "a"))],
    ids=str,
)
def test_tuple_of_axes_counts_ranks_in_row_major_order(backend, rng, axes):
    case, arguments, dense = random_problem(rng, 8, 4, 16)
    mesh = programs.make_mesh(a=2, b=4)
    config = programs.make_config(case)
    with jax_ep.Buffer(mesh, axes, config, backend=backend) as buffer:
        assert buffer.num_ranks == 8
        assert_matches(run_layer(buffer, case, arguments, rows=P(axes), experts=P(axes)), dense)


def test_tuple_of_outer_axes(backend, rng):
    """Groups along the first and the last of three axes."""
    case, arguments, dense = random_problem(rng, 8, 3, 8)
    mesh = programs.make_mesh(a=2, data=2, b=2)
    config = programs.make_config(case)
    with jax_ep.Buffer(mesh, ("a", "b"), config, backend=backend) as buffer:
        assert buffer.num_ranks == 4
        rows = P(("data", "a", "b"))
        assert_matches(run_layer(buffer, case, arguments, rows=rows, experts=P(("a", "b"))), dense)


@pytest.mark.parametrize("backend", ["native"])
def test_rows_replicated_over_the_other_axis(backend, rng):
    """Both groups do the same work on the same tokens; gradients count them once."""
    case, arguments, dense = random_problem(rng, 4, 5, 8)
    mesh = programs.make_mesh(data=2, expert=4)
    config = programs.make_config(case)
    with jax_ep.Buffer(mesh, "expert", config, backend=backend) as buffer:
        results = run_layer(buffer, case, arguments, rows=P("expert"), experts=P("expert"))
        assert_matches(results, dense)


@pytest.mark.parametrize("backend", ["native"])
def test_axes_of_size_one(backend, rng):
    case, arguments, dense = random_problem(rng, 4, 5, 8)
    mesh = programs.make_mesh(data=1, expert=4, model=1)
    config = programs.make_config(case)
    with jax_ep.Buffer(mesh, ("expert", "model"), config, backend=backend) as buffer:
        both = P(("expert", "model"))
        assert_matches(run_layer(buffer, case, arguments, rows=both, experts=both), dense)


@pytest.mark.parametrize("backend", ["native"])
def test_groups_of_one_rank(backend, rng):
    case, arguments, dense = random_problem(rng, 4, 5, 8)
    mesh = programs.make_mesh(data=4, expert=1)
    config = programs.make_config(case)
    with jax_ep.Buffer(mesh, "expert", config, backend=backend) as buffer:
        assert (buffer.num_ranks, buffer.window_bytes) == (1, 0)
        results = run_layer(
            buffer, case, arguments, rows=P(("data", "expert")), experts=P("expert")
        )
        assert_matches(results, dense)


@pytest.mark.parametrize("axis_type", [AxisType.Explicit, AxisType.Auto], ids=str)
def test_mesh_in_context(rng, axis_type):
    """The mesh comes from jax.set_mesh, its axes of either type, arguments placed on it."""
    case, arguments, dense = random_problem(rng, 8, 5, 8)
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(axis_type,) * 2)
    rows, experts = P(("data", "expert")), P("expert")
    placed = [
        jax.device_put(argument, NamedSharding(mesh, spec))
        for argument, spec in zip(arguments, (rows, rows, rows, experts, rows), strict=True)
    ]
    config = programs.make_config(case)
    with jax.set_mesh(mesh), jax_ep.Buffer(mesh, "expert", config, backend="native") as buffer:
        assert_matches(run_layer(buffer, case, placed, rows=rows, experts=experts), dense)


def test_nested_shard_maps(backend, rng):
    """An outer shard_map over "data", and an inner one over "expert" around the layer."""
    case, arguments, dense = random_problem(rng, 8, 5, 8)
    x, topk_idx, topk_weights, matrices, _ = arguments
    mesh = programs.make_mesh(data=2, expert=4)
    config = programs.make_config(case)
    with jax_ep.Buffer(mesh, "expert", config, backend=backend) as buffer:
        inner = jax.shard_map(
            programs.linear_moe(buffer, case),
            in_specs=P("expert"),
            out_specs=P("expert"),
            axis_names={"expert"},
        )
        outer = jax.shard_map(
            inner,
            mesh=mesh,
            in_specs=(P("data"), P("data"), P("data"), P()),
            out_specs=P("data"),
            axis_names={"data"},
        )
        out = jax.block_until_ready(jax.jit(outer)(x, topk_idx, topk_weights, matrices))
    np.testing.assert_allclose(out, dense.out, rtol=0, atol=1e-5)


def test_faults_name_their_group(rng):
    case, arguments, _ = random_problem(rng, 8, 5, 8)
    x, topk_idx, topk_weights, matrices, _ = arguments
    topk_idx = topk_idx.copy()
    topk_idx[6 * case.T + 2, 1] = -7  # "data" 1, "expert" 2
    mesh = programs.make_mesh(data=2, expert=4)
    with jax_ep.Buffer(mesh, "expert", programs.make_config(case), backend="native") as buffer:
        layer = programs.sharded(
            buffer,
            programs.linear_moe(buffer, case),
            in_specs=(P(("data", "expert")),) * 3 + (P("expert"),),
        )
        jax.block_until_ready(jax.jit(layer)(x, topk_idx, topk_weights, matrices))
        with pytest.raises(jax_ep.EpDataError, match="on rank 2 of group 1") as caught:
            buffer.check()
    error = caught.value
    assert (error.count, error.group, error.rank, error.token, error.k) == (1, 1, 2, 2, 1)
