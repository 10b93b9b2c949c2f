"""Training of which every bit is decided: for several processes to have those of one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import programs
from jax.sharding import Mesh
from scenarios import World, expert_mesh, shards, spread

import jax_ep

# Small: XLA:CPU splits larger arrays over as many threads as a process has devices, and where the
# vectors of a part end, functions have other bits.
TOKENS, HIDDEN, FFN, TOP_K, EXPERTS_PER_RANK = 16, 32, 32, 2, 4
LEARNING_RATE, MOMENTUM = 0.4, 0.9

# What else would let the last bits differ: products split over as many threads as there are,
# libraries' kernels chosen by the clock, and sums by atomic additions.
COMPILER_OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_multi_thread_eigen": False,
    "xla_gpu_autotune_level": 0,
    "xla_gpu_deterministic_ops": True,
}


@dataclasses.dataclass
class Trained:
    """What so many steps give, by ranks: errors ``[R * T]`` each, and parameters ``[R * ...]``."""

    errors: list[jax.Array]
    parameters: dict[str, jax.Array]

    def arrays(self) -> dict[str, jax.Array]:
        named = {f"errors {step}": errors for step, errors in enumerate(self.errors)}
        return named | self.parameters

    def losses(self) -> list[float]:
        """Where all ranks are of this process."""
        return [float(np.mean(errors)) for errors in self.errors]


def initial_parameters(rng: np.random.Generator, num_ranks: int) -> dict[str, np.ndarray]:
    """Of all ranks, stacked: experts split over them, router and head copied to each."""

    def scaled(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / np.sqrt(shape[-2])).astype(np.float32)

    num_experts = EXPERTS_PER_RANK * num_ranks
    router, head = scaled(HIDDEN, num_experts), scaled(HIDDEN, HIDDEN)
    return {
        "router": np.tile(router, (num_ranks, 1)),
        "head": np.tile(head, (num_ranks, 1)),
        "w_in": scaled(num_experts, HIDDEN, FFN),
        "w_out": scaled(num_experts, FFN, HIDDEN),
    }


def rank_loss(buffer: jax_ep.Buffer, parameters, x, target):
    """This rank's part of the mean squared error of a mixture of experts and a linear head; and the
    tokens' errors ``[T]``, since XLA:CPU splits their sum over as many threads as there are."""
    probabilities = jax.nn.softmax(x @ parameters["router"])
    topk_weights, topk_idx = jax.lax.top_k(probabilities, TOP_K)
    routed = jax_ep.dispatch(buffer, x, topk_idx.astype(jnp.int32), topk_weights)
    ends = jnp.cumsum(routed.group_sizes)
    expert = jnp.searchsorted(ends, jnp.arange(routed.tokens.shape[0]), side="right")
    # Rows behind the last expert's are of no expert: all zeros here.
    chosen = jax.nn.one_hot(expert, EXPERTS_PER_RANK, dtype=x.dtype)
    h = jnp.einsum("re,rh,ehf->rf", chosen, routed.tokens, parameters["w_in"])
    y = jnp.einsum("re,rf,efh->rh", chosen, jax.nn.gelu(h), parameters["w_out"])
    found = (x + jax_ep.combine(buffer, y, routed)) @ parameters["head"]
    errors = jnp.mean(jnp.square(found - target), axis=1)
    return jnp.sum(errors) / (len(x) * buffer.num_ranks), errors


def in_rank_order(gradient: jax.Array) -> jax.Array:
    """The sum over all ranks, first to last: a library's own reduction might choose its order."""
    parts = jax.lax.all_gather(gradient, "expert")
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def make_step(buffer: jax_ep.Buffer):
    """``(parameters, momenta, x, target)`` to new parameters, momenta, and the tokens' errors."""

    def step(parameters, momenta, x, target):
        gradients, errors = jax.grad(
            lambda parameters: rank_loss(buffer, parameters, x, target), has_aux=True
        )(parameters)
        for name in ("router", "head"):
            gradients[name] = in_rank_order(gradients[name])
        momenta = jax.tree.map(lambda m, g: MOMENTUM * m + g, momenta, gradients)
        parameters = jax.tree.map(lambda p, m: p - LEARNING_RATE * m, parameters, momenta)
        return parameters, momenta, errors

    return jax.jit(programs.sharded(buffer, step), compiler_options=COMPILER_OPTIONS)


def trained(mesh: Mesh, seed: int, num_steps: int, backend: str = "native") -> Trained:
    """Steps on one batch, from parameters that are the same in every process."""
    rng = np.random.default_rng(seed)
    config = jax_ep.EpConfig(
        num_experts=EXPERTS_PER_RANK * mesh.size,
        num_experts_per_tok=TOP_K,
        hidden=HIDDEN,
        max_tokens_per_rank=TOKENS,
        dtype=jnp.float32,
        chunk_tokens=TOKENS // 4,
        timeout_s=20.0,
    )
    start = initial_parameters(rng, mesh.size)
    batch = [rng.normal(size=(mesh.size * TOKENS, HIDDEN)).astype(np.float32) for _ in range(2)]
    x, target = (spread(mesh, array) for array in batch)
    parameters = {name: spread(mesh, array) for name, array in start.items()}
    momenta = {name: spread(mesh, np.zeros_like(array)) for name, array in start.items()}
    errors = []
    with jax_ep.Buffer(mesh, "expert", config, backend=backend) as buffer:
        step = make_step(buffer)
        for _ in range(num_steps):
            parameters, momenta, errors_now = step(parameters, momenta, x, target)
            errors.append(errors_now)
        jax.block_until_ready(parameters)
        buffer.check()
    return Trained(errors, parameters)


def train_to_the_bit(world: World) -> dict:
    """Saves the shards of all errors and of the parameters after the last step."""
    settings = world.settings
    found = trained(expert_mesh(len(jax.devices())), settings["seed"], settings["steps"])
    saved = {}
    for name, array in found.arrays().items():
        saved |= shards(name, array)
    world.save(saved)
    return {}
