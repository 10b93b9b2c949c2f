"""What processes with a GPU each do together, beside what ``scenarios.py`` has for all devices."""

import cases
import jax
import jax.numpy as jnp
import ll_check
import numpy as np
import programs
from fault_scenarios import dispatch_of, failure_of, open_buffer, step_by_step
from jax.sharding import Mesh
from scenarios import World, expert_mesh, shards, spread

import jax_ep

LOW_LATENCY = cases.Case(name="low_latency", T=33, H=1024, K=4, E=16, R=2, dtype="bfloat16")
NUM_STEPS = 6


def low_latency_results(mesh: Mesh, seed: int) -> dict[str, jax.Array]:
    """Layers of whole operations and of halves, with fresh inputs in every step."""
    rng = np.random.default_rng(seed)
    config = programs.make_config(LOW_LATENCY, mode="low_latency")
    found = {}
    with jax_ep.Buffer(mesh, "expert", config, backend="native") as buffer:

        def layer(x, topk_idx, topk_weights):
            routed = ll_check.dispatch(buffer, LOW_LATENCY, "padded", x, topk_idx, topk_weights)
            x = jax_ep.low_latency_combine(buffer, routed.tokens, routed)
            halves = ll_check.split_dispatch(
                buffer, LOW_LATENCY, "compact", x, topk_idx, topk_weights
            )
            return ll_check.split_combine(buffer, halves.tokens, halves), routed.counts

        run = jax.jit(programs.sharded(buffer, layer))
        for step in range(NUM_STEPS):
            inputs = cases.make_inputs(LOW_LATENCY, rng)
            arrays = (inputs.x, inputs.topk_idx, inputs.topk_weights)
            out, counts = run(*(spread(mesh, array) for array in arrays))
            found |= {f"out{step}": out, f"counts{step}": counts}
        jax.block_until_ready(found)
        buffer.check()
    return found


def low_latency(world: World) -> dict:
    found = low_latency_results(expert_mesh(world.num_processes), world.settings["seed"])
    arrays: dict[str, np.ndarray] = {}
    for name, array in found.items():
        arrays |= shards(name, array)
    world.save(arrays)
    return {}


def absent_rank(world: World) -> dict:
    """The last process stays away from an operation; then all reset the buffer and go on."""
    meet = step_by_step(world)
    buffer, case = open_buffer(timeout_s=1.5)
    run = dispatch_of(buffer, case)
    run()
    meet()
    is_last = world.process == world.num_processes - 1
    failed = None if is_last else failure_of(lambda: _checked(buffer, run))
    meet()
    told = failure_of(lambda: _checked(buffer, run))
    meet()
    buffer.reset()
    healthy = failure_of(lambda: _checked(buffer, run))["type"] is None
    meet()
    buffer.close()
    return {"run": failed, "told": told, "healthy": healthy}


def killed_beside_us(world: World) -> dict:
    """The last process is killed; the others' GPUs go on to work."""
    world.leaves_at_once = True
    buffer, case = open_buffer(timeout_s=3)
    run = dispatch_of(buffer, case)
    run()
    world.say("step")
    failed = None
    for _ in range(100_000):
        failed = failure_of(lambda: _checked(buffer, run))
        if failed["type"] is not None:
            break
    alive = float(jnp.sum(jnp.ones((8, 8)))) == 64.0
    return {"run": failed, "alive": alive}


def _checked(buffer: jax_ep.Buffer, run) -> None:
    """On GPUs an operation that was launched raises nothing; the buffer tells."""
    run()
    buffer.check()
