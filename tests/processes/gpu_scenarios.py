"""What processes with a GPU each do together, beside what other scenarios have for all devices."""

import jax.numpy as jnp
from fault_scenarios import dispatch_of, failure_of, open_buffer, step_by_step
from scenarios import World

import jax_ep


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
