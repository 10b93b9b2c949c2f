"""The flax layer against the same layer computed densely, and what it reports."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_ep
from jax_ep.nn import ExpertParam, MoE, load_balancing_loss, parameter_shardings

E, K, H, F = 8, 2, 16, 24
BATCH, LENGTH = 8, 5


def make_buffer(
    backend,
    *,
    axes=("expert",),
    sizes=(8,),
    ep_axes="expert",
    axis_type=AxisType.Auto,
    dtype=jnp.float32,
):
    devices = jax.devices()[: int(np.prod(sizes))]
    mesh = jax.make_mesh(sizes, axes, devices=devices, axis_types=(axis_type,) * len(axes))
    config = jax_ep.EpConfig(
        num_experts=E,
        num_experts_per_tok=K,
        hidden=H,
        max_tokens_per_rank=BATCH * LENGTH // mesh.size,
        dtype=dtype,
    )
    return jax_ep.Buffer(mesh, ep_axes, config, backend=backend)


def dense_moe(parameters, x, activation):
    """Every expert on every token, weighted by the router's choice or by 0."""
    probabilities = jax.nn.softmax(x @ parameters["router_kernel"])
    threshold = jnp.sort(probabilities, axis=-1)[..., -K, None]
    weights = jnp.where(probabilities >= threshold, probabilities, 0)
    weights /= weights.sum(-1, keepdims=True)
    hidden = jnp.einsum("blh,ehf->blef", x, parameters["w_in"])
    if activation == "swiglu":
        hidden = jax.nn.silu(hidden[..., :F]) * hidden[..., F:]
    else:
        hidden = jax.nn.gelu(hidden)
    return jnp.einsum("ble,blef,efh->blh", weights, hidden, parameters["w_out"]), weights > 0


def values(state):
    return {name: np.asarray(variable[...]) for name, variable in state.items()}


def sharded_layer(buffer, rng, **options):
    """The layer's graph, its sharded parameters, and x sharded over the whole mesh."""
    layer = MoE(buffer, F, rngs=nnx.Rngs(int(rng.integers(2**31))), **options)
    graph, state = nnx.split(layer)
    state = jax.device_put(state, parameter_shardings(state, buffer.mesh, buffer.axis_names))
    batch = NamedSharding(buffer.mesh, PartitionSpec(buffer.mesh.axis_names))
    x = rng.normal(size=(BATCH, LENGTH, H)).astype(np.float32)
    return graph, state, jax.device_put(x, batch)


@pytest.mark.parametrize(
    ("place", "activation"),
    [
        ({"sizes": (1,)}, "swiglu"),
        ({"sizes": (8,)}, "gelu"),
        ({"sizes": (8,), "axis_type": AxisType.Explicit}, "swiglu"),
        ({"sizes": (2, 4), "axes": ("data", "expert")}, "swiglu"),
        ({"sizes": (2, 2), "axes": ("a", "b"), "ep_axes": ("a", "b")}, "swiglu"),
    ],
    ids=["one rank", "eight ranks", "explicit mesh", "data x expert", "two axes as one"],
)
def test_output_and_gradients_are_the_dense_ones(backend, rng, place, activation):
    with make_buffer(backend, **place) as buffer:
        graph, state, x = sharded_layer(buffer, rng, activation=activation)
        direction = rng.normal(size=x.shape).astype(np.float32)

        @jax.jit
        def outputs_and_gradients(state, x):
            def loss(state, x):
                y, stats = nnx.merge(graph, state)(x)
                return (y * jax.device_put(direction, jax.typeof(y).sharding)).sum(), (y, stats)

            return jax.grad(loss, argnums=(0, 1), has_aux=True)(state, x)

        results = jax.block_until_ready(outputs_and_gradients(state, x))
        buffer.check()
    (state_gradient, x_gradient), (y, stats) = results

    def dense_loss(parameters, x):
        y, chosen = dense_moe(parameters, x, activation)
        return (y * direction).sum(), (y, chosen)

    (expected_gradient, expected_x_gradient), (expected_y, chosen) = jax.grad(
        dense_loss, argnums=(0, 1), has_aux=True
    )(values(state), np.asarray(x))
    close = {"rtol": 1e-4, "atol": 1e-5}
    np.testing.assert_allclose(y, expected_y, **close)
    np.testing.assert_allclose(x_gradient, expected_x_gradient, **close)
    for name, gradient in values(state_gradient).items():
        assert np.abs(gradient).max() > 1e-3, f"{name} gets no gradient"
        np.testing.assert_allclose(gradient, expected_gradient[name], err_msg=name, **close)
    share = np.asarray(chosen).mean((0, 1)) / K
    np.testing.assert_allclose(stats.expert_share, share, rtol=1e-6)
    assert stats.num_dropped == 0


def test_rows_in_bfloat16(backend, rng):
    """Rows travel and are multiplied in bfloat16, 8 bits of mantissa; routing stays in float32."""
    with make_buffer(backend, dtype=jnp.bfloat16) as buffer:
        graph, state, x = sharded_layer(buffer, rng)
        y, stats = jax.device_get(jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, x))
    expected, chosen = dense_moe(values(state), np.asarray(x), "swiglu")
    assert y.dtype == np.float32
    np.testing.assert_array_equal(y, y.astype(jnp.bfloat16).astype(np.float32))
    np.testing.assert_allclose(y, expected, rtol=0.03, atol=0.03 * np.abs(expected).max())
    share = np.asarray(chosen).mean((0, 1)) / K
    np.testing.assert_allclose(stats.expert_share, share, rtol=1e-6)


def test_what_does_not_fit_is_dropped_and_counted(backend, rng):
    """At capacity factor 0.8 a rank has room for 8 rows, and drops its rows beyond them."""
    with make_buffer(backend) as buffer:
        graph, state, x = sharded_layer(buffer, rng, capacity_factor=0.8)
        _, stats = jax.device_get(jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, x))
    rows_of_rank = np.asarray(stats.expert_share) * BATCH * LENGTH * K  # one expert on each rank
    expected = np.maximum(rows_of_rank.round() - 8, 0).sum()
    assert expected > 0
    assert stats.num_dropped == expected


def test_load_balancing_loss_by_hand(rng):
    equal = jnp.full(E, 1 / E)
    everything_on_one = jnp.zeros(E).at[3].set(1.0)
    assert load_balancing_loss(equal, equal) == pytest.approx(1.0)
    assert load_balancing_loss(everything_on_one, everything_on_one) == pytest.approx(E)

    with make_buffer("reference") as buffer:
        graph, state, x = sharded_layer(buffer, rng)
        _, stats = jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, x)
    probability = jax.nn.softmax(np.asarray(x) @ values(state)["router_kernel"]).mean((0, 1))
    expected = E * (np.asarray(stats.expert_share) * probability).sum()
    assert stats.aux_loss == pytest.approx(float(expected), rel=1e-5)


def test_experts_are_sharded_and_the_router_is_not(rng):
    with make_buffer("reference") as buffer:
        _, state, _ = sharded_layer(buffer, rng)
    for name, variable in state.items():
        shard = variable[...].addressable_shards[0].data.shape
        expected = (E // 8,) if isinstance(variable, ExpertParam) else variable.shape[:1]
        assert shard == expected + variable.shape[1:], name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ffn_size": 0}, r"ffn_size=0 must be at least 1"),
        ({"capacity_factor": -1.0}, r"capacity_factor=-1.0 must be positive.*None never drops"),
        ({"activation": "relu"}, r"activation='relu' must be 'swiglu' or 'gelu'"),
    ],
)
def test_unusable_layers_are_refused(arguments, message):
    arguments = {"ffn_size": F} | arguments
    with make_buffer("reference") as buffer, pytest.raises(jax_ep.EpUsageError, match=message):
        MoE(buffer, arguments.pop("ffn_size"), rngs=nnx.Rngs(0), **arguments)


def test_a_batch_that_does_not_divide_is_refused():
    with make_buffer("reference") as buffer:
        layer = MoE(buffer, F, rngs=nnx.Rngs(0))
        with pytest.raises(jax_ep.EpUsageError, match=r"x has shape \(6, 5, 16\).*8 devices"):
            layer(jnp.zeros((6, LENGTH, H)))
