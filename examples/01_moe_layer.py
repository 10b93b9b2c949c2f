"""A mixture-of-experts layer in 20 lines, checked against the same layer computed densely.

Run it with ``python examples/01_moe_layer.py``.
"""

import os

# Eight CPU devices stand in for eight GPUs. Where there are GPUs, it is those that are used.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jax_ep

E, K = 16, 2  # experts, experts per token
H, F = 64, 128  # hidden size, width of an expert
T = 32  # tokens per rank
NUM_RANKS = len(jax.devices())


def moe_layer(buffer):
    """The layer on global arrays: tokens and experts are both sharded along the mesh's one axis."""

    def moe(x, topk_idx, topk_weights, w_in, w_out):  # one rank's shard
        routed = jax_ep.dispatch(buffer, x, topk_idx, topk_weights)  # rows grouped by expert
        h = jax.nn.gelu(jax.lax.ragged_dot(routed.tokens, w_in, routed.group_sizes))
        y = jax.lax.ragged_dot(h, w_out, routed.group_sizes)
        return jax_ep.combine(buffer, y, routed)  # [T, H]: sum over k of weight_k * y_k

    return jax.jit(
        jax.shard_map(moe, mesh=buffer.mesh, in_specs=P("expert"), out_specs=P("expert"))
    )


def dense_layer(x, topk_idx, topk_weights, w_in, w_out):
    """Every expert on every token, on one device; unchosen experts get weight 0."""
    y = jnp.einsum("tef,efh->teh", jax.nn.gelu(jnp.einsum("th,ehf->tef", x, w_in)), w_out)
    weights = (jax.nn.one_hot(topk_idx, E) * topk_weights[..., None]).sum(1)
    return jnp.einsum("te,teh->th", weights, y)


def random_inputs(key):
    keys = jax.random.split(key, 4)
    x = jax.random.normal(keys[0], (NUM_RANKS * T, H))
    scores = jax.random.normal(keys[1], (NUM_RANKS * T, E))
    topk_weights, topk_idx = jax.lax.top_k(jax.nn.softmax(scores), K)
    w_in = jax.random.normal(keys[2], (E, H, F)) / H**0.5
    w_out = jax.random.normal(keys[3], (E, F, H)) / F**0.5
    return x, topk_idx, topk_weights, w_in, w_out


def main():
    mesh = jax.make_mesh((NUM_RANKS,), ("expert",))
    config = jax_ep.EpConfig(
        num_experts=E, num_experts_per_tok=K, hidden=H, max_tokens_per_rank=T, dtype=jnp.float32
    )
    inputs = random_inputs(jax.random.key(0))
    with jax_ep.Buffer(mesh, axis_name="expert", config=config) as buffer:
        layer = moe_layer(buffer)
        shards = jax.device_put(inputs, jax.NamedSharding(mesh, P("expert")))
        weights_gradient = jax.jit(jax.grad(lambda *args: (layer(*args) ** 2).sum(), argnums=2))
        # Fetching waits for the results, which the buffer must outlive.
        y, gradient = jax.device_get((layer(*shards), weights_gradient(*shards)))
        backend = buffer.backend

    expected = dense_layer(*inputs)
    expected_gradient = jax.grad(lambda *args: (dense_layer(*args) ** 2).sum(), argnums=2)(*inputs)
    print(f"{NUM_RANKS * T} tokens, {E} experts on {NUM_RANKS} ranks, backend {backend}")
    for name, value, reference in [
        ("output", y, expected),
        ("gradient to topk_weights", gradient, expected_gradient),
    ]:
        error = jnp.abs(value - reference).max() / jnp.abs(reference).max()
        print(f"{name} {value.shape}: {error:.1e} of its largest value away from the dense layer")
        assert error < 1e-5, f"{name} differs from the dense layer by {error}"


if __name__ == "__main__":
    main()
