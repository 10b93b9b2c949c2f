"""Processes that come late, go early, or are killed while programs run. On CPU devices and GPUs."""

import ctypes
import time

import cases
import jax
import jax.numpy as jnp
import numpy as np
import programs
from fault_scenarios import dispatch_of, failure_of, open_buffer
from jax._src import distributed
from scenarios import World, bits, compiled, spread

import jax_ep

_kept = []  # buffers that are left to the end of the process


def late_starters(world: World) -> dict:
    """The last process comes late to the buffer and to an operation, the first one to another."""
    late_s, last = world.settings["late_s"], world.num_processes - 1
    if world.process == last:
        time.sleep(late_s)
    buffer, case = open_buffer(timeout_s=10)
    with buffer:
        run = dispatch_of(buffer, case)
        expected, found = bits(run()), []
        for late in (last, 0):
            if world.process == late:
                time.sleep(late_s)
            began = time.monotonic()
            same = bits(run()) == expected
            waited_s = time.monotonic() - began
            found.append({"same": same, "waited_s": waited_s, "check": failure_of(buffer.check)})
    return {"operations": found}


def left_behind(world: World) -> dict:
    """One process closes its buffer and goes; the other uses it, then closes it and goes, too."""
    first = world.settings["first"]
    buffer, case = open_buffer(timeout_s=2)
    run = dispatch_of(buffer, case)
    run()
    if world.process == first:
        buffer.close()
        return {}
    _wait_for(world.folder / f"{first}.json")
    time.sleep(1)  # for it to be on its way out
    left = failure_of(lambda: (run(), buffer.check()))
    return {
        "module": buffer.native_module.__name__,
        "left": left,
        "closed": failure_of(buffer.close),
        "alive": _devices_work(),
    }


def killed_in_a_program(world: World) -> dict:
    """The last process is killed in one of many programs of many operations each.

    The others leave their buffer to the end of the process, which comes without JAX's farewell.
    """
    buffer, case = open_buffer(timeout_s=2)
    _kept.append(buffer)
    run = layers_in_a_row(buffer, case, world.settings["operations"])
    run()
    world.say("step")
    for _ in range(100_000):
        failed = failure_of(lambda: (run(), buffer.check()))
        if failed["type"] is not None:
            break
    again = failure_of(lambda: (run(), buffer.check()))
    _without_farewell()
    return {
        "module": buffer.native_module.__name__,
        "run": failed,
        "again": again,
        "alive": _devices_work(),
    }


def layers_in_a_row(buffer: jax_ep.Buffer, case: cases.Case, count: int):
    """A compiled program of so many dispatches, each with its combine, with its arguments."""
    inputs = cases.make_inputs(case, np.random.default_rng(5))
    weights = inputs.topk_weights / inputs.topk_weights.sum(1, keepdims=True)
    arguments = [spread(buffer.mesh, a) for a in (inputs.x, inputs.topk_idx, weights)]

    def program(x, topk_idx, topk_weights):
        def layer(x, _):
            routed = programs.dispatch(buffer, case, x, topk_idx, topk_weights)
            return jax_ep.combine(buffer, routed.tokens, routed), None

        return jax.lax.scan(layer, x, length=count)[0]

    run = compiled(buffer, program)
    return lambda: jax.block_until_ready(run(*arguments))


def _wait_for(path, limit_s: float = 60) -> None:
    end = time.monotonic() + limit_s
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{path} did not appear within {limit_s} s")
        time.sleep(0.01)


def _devices_work() -> bool:
    """Whether the devices of this process still compute."""
    ones = [jax.device_put(jnp.ones((8, 8)), device) for device in jax.local_devices()]
    return all(float(jnp.sum(one)) == 64 for one in ones)


def _without_farewell() -> None:
    """Lets the interpreter end without a word to the processes that JAX knows.

    JAX waits 300 s there for one that has died, or ends this process the hard way after 100 s.
    """
    for name in ("client", "service"):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(getattr(distributed.global_state, name)))
        setattr(distributed.global_state, name, None)
