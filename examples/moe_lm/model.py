"""A decoder-only transformer over bytes whose feed-forward layers are mixtures of experts."""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jax_ep
from jax_ep.nn import MoE, MoeStats

from .data import VOCABULARY_SIZE
from .settings import Settings


def rotate_by_position(x: jax.Array) -> jax.Array:
    """Rotary position embedding (arXiv:2104.09864) of ``[batch, position, head, channel]``."""
    _, seq_len, _, head_size = x.shape
    frequencies = 10_000.0 ** -jnp.linspace(0.0, 1.0, head_size // 2, endpoint=False)
    angles = jnp.arange(seq_len)[:, None, None] * frequencies
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


class Attention(nnx.Module):
    """Causal self-attention, ``[batch, position, hidden]`` to the same shape."""

    def __init__(self, settings: Settings, *, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, settings.hidden, use_bias=False, rngs=rngs)
        self.num_heads = settings.num_heads
        self.qkv = linear(3 * settings.hidden)
        self.out = linear(settings.hidden)

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = self.qkv(x).reshape(*x.shape[:2], 3 * self.num_heads, -1)
        q, k, v = jnp.split(heads, 3, axis=2)
        y = jax.nn.dot_product_attention(
            rotate_by_position(q), rotate_by_position(k), v, is_causal=True
        )
        return self.out(y.reshape(x.shape))


class Block(nnx.Module):
    """Attention, then a mixture of experts, each on the normalised stream and added to it."""

    def __init__(self, settings: Settings, buffer: jax_ep.Buffer, *, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(settings.hidden, rngs=rngs)
        self.attention = Attention(settings, rngs=rngs)
        self.moe_norm = nnx.RMSNorm(settings.hidden, rngs=rngs)
        self.moe = MoE(
            buffer, settings.ffn_size, capacity_factor=settings.capacity_factor, rngs=rngs
        )

    def __call__(self, x: jax.Array) -> tuple[jax.Array, MoeStats]:
        x = x + self.attention(self.attention_norm(x))
        y, stats = self.moe(self.moe_norm(x))
        return x + y, stats


class MoeLM(nnx.Module):
    """Bytes, int32 ``[batch, position]``, to logits of the next ``[batch, position, 256]``."""

    def __init__(self, settings: Settings, buffer: jax_ep.Buffer, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY_SIZE, settings.hidden, rngs=rngs)
        self.blocks = nnx.List(
            [Block(settings, buffer, rngs=rngs) for _ in range(settings.num_layers)]
        )
        self.norm = nnx.RMSNorm(settings.hidden, rngs=rngs)
        self.head = nnx.Linear(settings.hidden, VOCABULARY_SIZE, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, MoeStats]:
        """Returns the logits and the layers' statistics, stacked along a leading layer axis."""
        x = self.embed(tokens)
        all_stats = []
        for block in self.blocks:
            x, stats = block(x)
            all_stats.append(stats)
        return self.head(self.norm(x)), jax.tree.map(lambda *leaves: jnp.stack(leaves), *all_stats)


def next_byte_loss(model: MoeLM, windows: jax.Array) -> tuple[jax.Array, MoeStats]:
    """Mean cross entropy, in nats, of each byte of the windows given those before it."""
    logits, stats = model(windows[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
    return losses.mean(), stats
