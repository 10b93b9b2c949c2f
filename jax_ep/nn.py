"""A mixture-of-experts layer for flax.nnx on top of `jax_ep.dispatch` and `jax_ep.combine`.

Needs the extra ``examples`` (flax); `jax_ep` itself never imports this module.

`moe_shard` is the computation of one rank and knows nothing of flax: call it inside a
`jax.shard_map` of your own. `MoE` owns the parameters and wraps that call.
"""

import functools
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ep.buffer import Buffer
from jax_ep.errors import EpUsageError
from jax_ep.ops import combine, dispatch

Activation = Literal["swiglu", "gelu"]


class MoeStats(NamedTuple):
    """What a training loop adds to its loss and shows; the same on every rank.

    Attributes:
        aux_loss: float32 scalar, the load-balancing loss; 1 when the experts' load is balanced.
        expert_share: float32 ``[E]``, the share of all routed (token, expert) pairs that each
            expert was chosen for, before any was dropped. Sums to 1.
        num_dropped: int32 scalar, the pairs that found no room in the capacity, over all ranks.
    """

    aux_loss: jax.Array
    expert_share: jax.Array
    num_dropped: jax.Array


class ExpertParam(nnx.Param):
    """A parameter with one slice per expert along its first axis, ``[E, ...]``."""


def router(
    x: jax.Array, kernel: jax.Array, num_experts_per_tok: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Softmax over all experts, then the k largest, renormalised to sum to 1.

    Args:
        x: ``[T, H]``, any float type; computed in float32, since rounding would change the choice.
        kernel: float32 ``[H, E]``.
        num_experts_per_tok: K.

    Returns:
        Weights float32 ``[T, K]``, experts int32 ``[T, K]``, probabilities float32 ``[T, E]``.
    """
    probabilities = jax.nn.softmax(x.astype(jnp.float32) @ kernel.astype(jnp.float32))
    weights, experts = jax.lax.top_k(probabilities, num_experts_per_tok)
    weights = weights / weights.sum(-1, keepdims=True)
    return weights, experts.astype(jnp.int32), probabilities


def load_balancing_loss(expert_share: jax.Array, mean_probability: jax.Array) -> jax.Array:
    """``E * sum_e f_e * P_e``, the auxiliary loss of the Switch Transformer.

    ``f_e`` is the share of the routed pairs that chose expert e, ``P_e`` the mean probability the
    router gives it, both over the whole batch: equations 4 to 6 of arXiv:2101.03961, with GShard's
    top-k (arXiv:2006.16668). Balanced routing gives 1, all tokens on one expert gives E. The
    gradient flows through ``P`` alone, as ``f`` is a count.

    Args:
        expert_share: float32 ``[E]``, f.
        mean_probability: float32 ``[E]``, P.
    """
    return expert_share.size * jnp.vdot(expert_share, mean_probability)


def expert_ffn(
    tokens: jax.Array,
    group_sizes: jax.Array,
    w_in: jax.Array,
    w_out: jax.Array,
    activation: Activation = "swiglu",
) -> jax.Array:
    """The experts of one rank on the rows of `Routed.tokens`: ``[capacity, H]`` to the same shape.

    XLA's CPU backend multiplies all rows with every local expert and masks, so there the cost grows
    with ``E_l * capacity``: keep both small.

    Args:
        tokens: ``[capacity, H]``, expert-major.
        group_sizes: int32 ``[E_l]``, rows of each expert.
        w_in: ``[E_l, H, 2F]`` for swiglu (gate, then value), ``[E_l, H, F]`` for gelu.
        w_out: ``[E_l, F, H]``.
    """
    hidden = jax.lax.ragged_dot(tokens, w_in, group_sizes)
    if activation == "swiglu":
        gate, value = jnp.split(hidden, 2, axis=-1)
        hidden = jax.nn.silu(gate) * value
    else:
        hidden = jax.nn.gelu(hidden)
    return jax.lax.ragged_dot(hidden, w_out, group_sizes)


def capacity_for(buffer: Buffer, num_tokens: int, capacity_factor: float | None) -> int | None:
    """Rows of one rank's buffer for `num_tokens` tokens per rank: a multiple of 8, or None.

    Balanced routing fills ``num_tokens * K`` rows on every rank; `capacity_factor` times that is
    the room for imbalance. None, and a factor beyond the worst case, give None: the worst case,
    which never drops.
    """
    if capacity_factor is None:
        return None
    config = buffer.config
    per_token_worst = min(config.num_experts_per_tok, buffer.experts_per_rank)
    rows = max(1, math.ceil(capacity_factor * num_tokens * config.num_experts_per_tok / 8)) * 8
    return None if rows >= buffer.num_ranks * num_tokens * per_token_worst else rows


def moe_shard(
    buffer: Buffer,
    x: jax.Array,
    router_kernel: jax.Array,
    w_in: jax.Array,
    w_out: jax.Array,
    *,
    capacity_factor: float | None = None,
    activation: Activation = "swiglu",
) -> tuple[jax.Array, MoeStats]:
    """One rank's share of a mixture-of-experts layer; call it inside `jax.shard_map`.

    Args:
        buffer: the group's buffer; its config gives E, K, H and the type of the rows.
        x: ``[T, H]``, this rank's tokens.
        router_kernel: float32 ``[H, E]``, the same on every rank.
        w_in: ``[E_l, H, 2F]`` (swiglu) or ``[E_l, H, F]`` (gelu), this rank's experts.
        w_out: ``[E_l, F, H]``, this rank's experts.
        capacity_factor: see `capacity_for`; None never drops.
        activation: "swiglu" or "gelu".

    Returns:
        ``[T, H]`` in the type of `x`, and the statistics over all ranks of the mesh.

    Raises:
        EpUsageError: as `jax_ep.dispatch` does.
    """
    dtype = buffer.config.dtype
    weights, experts, probabilities = router(x, router_kernel, buffer.config.num_experts_per_tok)
    routed = dispatch(
        buffer,
        x.astype(dtype),
        experts,
        weights,
        capacity=capacity_for(buffer, x.shape[0], capacity_factor),
    )
    y = expert_ffn(
        routed.tokens, routed.group_sizes, w_in.astype(dtype), w_out.astype(dtype), activation
    )
    y = combine(buffer, y, routed).astype(x.dtype)

    over_all = functools.partial(jax.lax.pmean, axis_name=buffer.mesh.axis_names)
    chosen = jax.nn.one_hot(experts, probabilities.shape[-1], dtype=jnp.float32)
    expert_share = over_all(chosen.mean((0, 1)))
    stats = MoeStats(
        aux_loss=load_balancing_loss(expert_share, over_all(probabilities.mean(0))),
        expert_share=expert_share,
        num_dropped=jax.lax.psum(routed.num_dropped, buffer.mesh.axis_names),
    )
    return y, stats


class MoE(nnx.Module):
    """Router, experts, and the exchange of tokens between the ranks that hold them.

    Parameters are global arrays: the router ``[H, E]``, replicated, and the experts' matrices
    ``[E, ...]``, sharded along the buffer's axes (`parameter_shardings`). The layer opens its own
    `jax.shard_map`, so it is called like any other, on global arrays under `jax.jit`.
    """

    def __init__(
        self,
        buffer: Buffer,
        ffn_size: int,
        *,
        capacity_factor: float | None = None,
        activation: Activation = "swiglu",
        rngs: nnx.Rngs,
    ):
        """Makes float32 parameters; rows travel and are multiplied in ``buffer.config.dtype``.

        Args:
            buffer: an open `jax_ep.Buffer`; layers that run one after another can share it.
            ffn_size: F, the width of each expert.
            capacity_factor: room for imbalance (`capacity_for`); None never drops a token.
            activation: "swiglu" or "gelu".
            rngs: keys for the initial parameters.

        Raises:
            EpUsageError: `ffn_size`, `capacity_factor` or `activation` is not usable.
        """
        _check_layer(ffn_size, capacity_factor, activation)
        config = buffer.config
        num_experts, hidden = config.num_experts, config.hidden
        in_size = 2 * ffn_size if activation == "swiglu" else ffn_size
        per_expert = nnx.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=(0,))
        self.router_kernel = nnx.Param(
            nnx.initializers.normal(hidden**-0.5)(rngs.params(), (hidden, num_experts))
        )
        self.w_in = ExpertParam(per_expert(rngs.params(), (num_experts, hidden, in_size)))
        self.w_out = ExpertParam(per_expert(rngs.params(), (num_experts, ffn_size, hidden)))
        self.buffer = buffer
        self.capacity_factor = capacity_factor
        self.activation = activation

    def __call__(self, x: jax.Array) -> tuple[jax.Array, MoeStats]:
        """Every device of the mesh takes an equal part of the batch.

        Args:
            x: ``[batch, ..., H]``, `batch` a multiple of the mesh's size.

        Returns:
            The same shape and type, and the statistics.

        Raises:
            EpUsageError: `x` does not divide among the devices, or `jax_ep.dispatch` refuses it.
        """
        mesh = self.buffer.mesh
        if x.ndim < 2 or x.shape[0] % mesh.size:
            raise EpUsageError(
                f"x has shape {x.shape}, whose first axis does not divide among the mesh's "
                f"{mesh.size} devices; pass [batch, ..., hidden] with batch a multiple of that"
            )
        tokens = PartitionSpec(mesh.axis_names)
        experts = PartitionSpec(self.buffer.axis_names)

        def shard(x, router_kernel, w_in, w_out):
            y, stats = moe_shard(
                self.buffer,
                x.reshape(-1, x.shape[-1]),
                router_kernel,
                w_in,
                w_out,
                capacity_factor=self.capacity_factor,
                activation=self.activation,
            )
            return y.reshape(x.shape), stats

        sharded = jax.shard_map(
            shard,
            mesh=mesh,
            in_specs=(tokens, PartitionSpec(), experts, experts),
            out_specs=(tokens, PartitionSpec()),
        )
        return sharded(x, self.router_kernel[...], self.w_in[...], self.w_out[...])


def parameter_shardings(state: nnx.State, mesh: Mesh, axis_names: tuple[str, ...]):
    """Where each parameter of `state` lives: experts along `axis_names`, all others everywhere.

    Args:
        state: the state of any module that contains `MoE` layers, as `flax.nnx.split` gives it.
        mesh: the buffer's mesh.
        axis_names: the buffer's axes.

    Returns:
        A tree like `state` of `jax.sharding.NamedSharding`, for `jax.device_put` or `jax.jit`.
    """
    by_expert = NamedSharding(mesh, PartitionSpec(axis_names))
    everywhere = NamedSharding(mesh, PartitionSpec())

    def place(variable):
        return by_expert if isinstance(variable, ExpertParam) else everywhere

    return jax.tree.map(place, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def _check_layer(ffn_size: int, capacity_factor: float | None, activation: str) -> None:
    if ffn_size < 1:
        raise EpUsageError(f"ffn_size={ffn_size!r} must be at least 1")
    if capacity_factor is not None and not 0 < capacity_factor < math.inf:
        raise EpUsageError(
            f"capacity_factor={capacity_factor!r} must be positive and finite; 1.0 is room for "
            "balanced routing, None never drops"
        )
    if activation not in ("swiglu", "gelu"):
        raise EpUsageError(f"activation={activation!r} must be 'swiglu' or 'gelu'")
