"""Jobs in which something goes wrong. Each function returns JSON for the test to judge."""

import contextlib
import time

import cases
import jax
import jax.numpy as jnp
import numpy as np
import programs
from scenarios import World, bits, compiled, expert_mesh, spread

import jax_ep
from jax_ep import _bootstrap, _windows


def open_buffer(timeout_s: float, **changes) -> tuple[jax_ep.Buffer, cases.Case]:
    """A buffer over all devices of the job, and its case, of four chunks an operation where an
    operation has several."""
    count = len(jax.devices())
    chunk = None if changes.get("mode") == "low_latency" else 4
    case = cases.Case(name="faults", T=13, H=16, K=3, E=8 * count, R=count, chunk=chunk)
    config = programs.make_config(case, timeout_s=timeout_s, **changes)
    return jax_ep.Buffer(expert_mesh(count), "expert", config, backend="native"), case


def dispatch_of(buffer: jax_ep.Buffer, case: cases.Case):
    """A compiled dispatch, in low latency also a combine, with arguments that all have alike."""
    inputs = cases.make_inputs(case, np.random.default_rng(5))
    arguments = [spread(buffer.mesh, a) for a in (inputs.x, inputs.topk_idx, inputs.topk_weights)]

    def program(x, topk_idx, topk_weights):
        if buffer.config.mode == "low_latency":  # rows past the counts are not specified
            routed = jax_ep.low_latency_dispatch(buffer, x, topk_idx, topk_weights)
            return jax_ep.low_latency_combine(buffer, routed.tokens, routed)
        return programs.dispatch(buffer, case, x, topk_idx, topk_weights).tokens

    run = compiled(buffer, program)
    return lambda: jax.block_until_ready(run(*arguments))


def failure_of(call) -> dict:
    """What a call raises, and after how many seconds."""
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        found = {"type": type(error).__name__, "text": str(error)}
        for name in ("rank", "peer", "op"):
            found[name] = getattr(error, name, None)
        return found | {"seconds": time.monotonic() - began}
    return {"type": None, "text": "", "seconds": time.monotonic() - began}


def killed_in_a_step(world: World) -> dict:
    """The last process sleeps in its part of an operation until it is killed."""
    world.leaves_at_once = True
    buffer, case = open_buffer(timeout_s=20)
    run = dispatch_of(buffer, case)
    run()
    if world.process == world.num_processes - 1:
        buffer._native.set_fault(buffer.id, "late", case.R - 1, microseconds=60_000_000)
    world.say("step")
    failed = failure_of(run)
    return {
        "run": failed,
        "check": failure_of(buffer.check),
        "again": failure_of(run),
        "reset": failure_of(buffer.reset),
    }


def step_by_step(world: World):
    """Gives ``meet()``: nobody goes on before all have come."""
    peers = _bootstrap.Peers(
        range(world.num_processes),
        world.process,
        _bootstrap.runtime_exchange(range(world.num_processes), world.process),
    )
    return lambda: peers.gather("test", b"")


def faults_and_resets(world: World) -> dict:
    """Faults of one process's ranks, each mended by a reset of all."""
    buffer, case = open_buffer(timeout_s=2)
    meet, run = step_by_step(world), dispatch_of(buffer, case)
    healthy = bits(run())
    results = {}
    is_last, last_rank = world.process == world.num_processes - 1, case.R - 1

    def note(name: str, call) -> None:
        results[name] = {"run": failure_of(call)}
        meet()
        results[name]["check"] = failure_of(buffer.check)
        results[name]["refused"] = failure_of(run)
        meet()
        buffer.reset()
        results[name]["healthy"] = bits(run()) == healthy and buffer.check() is None
        meet()

    for name, fault, seconds in (("mismatch", "wrong_tag", 0), ("late", "late", 3.5)):
        if is_last:
            buffer._native.set_fault(buffer.id, fault, last_rank, microseconds=round(seconds * 1e6))
        note(name, run)
    note("absent", (lambda: None) if is_last else run)
    with buffer:
        results["stats"] = buffer.stats()["dispatch_epochs"]
    return results


def disagreements(world: World) -> dict:
    """Buffers that the processes cannot make together, and one that they can after all."""
    is_last = world.process == world.num_processes - 1
    mesh = expert_mesh(len(jax.devices()))
    settings = {"num_experts": 12, "num_experts_per_tok": 2, "dtype": jnp.float32}

    def make(**changes):
        own = settings | {"hidden": 16, "max_tokens_per_rank": 8} | changes
        buffer = jax_ep.Buffer(mesh, "expert", jax_ep.EpConfig(**own))
        buffer.close()
        return buffer.id

    results = {
        "hidden": failure_of(lambda: make(hidden=32 if is_last else 16)),
        "tokens": failure_of(lambda: make(max_tokens_per_rank=9 if is_last else 8)),
        "experts": failure_of(lambda: make(num_experts=13 if is_last else 12)),
    }
    version = jax.__version__
    with _replaced(jax, "__version__", "0.0.1" if is_last else version):
        results["version"] = failure_of(make)
    with _replaced(_windows.os, "geteuid", lambda: 7 if is_last else 0):
        results["user"] = failure_of(make)
    with _replaced(_windows, "_make", _cannot if is_last else _windows._make):
        results["memory"] = failure_of(make)
    if is_last:
        ids_ahead = [_local_buffer(settings) for _ in range(3)]
        results["ahead"] = ids_ahead[-1]
    results["ids"] = [make(), make()]
    return results


def _cannot(*_):
    raise jax_ep.EpError("no memory left for this test")


def _local_buffer(settings: dict) -> int:
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()), ("expert",))
    config = jax_ep.EpConfig(**settings, hidden=16, max_tokens_per_rank=8)
    with jax_ep.Buffer(mesh, "expert", config) as buffer:
        return buffer.id


@contextlib.contextmanager
def _replaced(owner, name: str, value):
    """Sets an attribute for a while."""
    former = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, former)


def exchanges(world: World) -> dict:
    """Bytes of all sizes to all, then a process that does not come."""
    everyone = range(world.num_processes)
    exchange = _bootstrap.runtime_exchange(everyone, world.process, deadline_s=60)
    sound = []
    for size in (0, 1, _bootstrap.CHUNK_BYTES, 5_000_000 + world.process):
        received = exchange(bytes([world.process]) * size)
        sound.append(
            all(part == bytes([p]) * len(part) for p, part in enumerate(received))
            and all(abs(len(part) - size) < world.num_processes for part in received)
        )
    if world.process == world.num_processes - 1:
        return {"sound": sound}
    # Long enough for the other one to come on a busy machine.
    hasty = _bootstrap.runtime_exchange(everyone, world.process, deadline_s=3)
    return {"sound": sound, "missing": failure_of(lambda: hasty(b"here"))}


def teardown(world: World) -> dict:
    """Processes close, or leave without closing, in one order and in the other."""
    meet, results = step_by_step(world), {}
    for first in range(world.num_processes):
        buffer, case = open_buffer(timeout_s=20)
        run = dispatch_of(buffer, case)
        run()
        if world.process == first:
            buffer.close()
            meet()
        else:
            meet()
            results["left"] = failure_of(run)
            buffer.close()
    buffer, case = open_buffer(timeout_s=20)
    dispatch_of(buffer, case)()
    return results  # the last buffer is closed as the interpreter exits
