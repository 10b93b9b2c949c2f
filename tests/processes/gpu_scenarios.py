"""What processes with a GPU each do together, beside what other scenarios have for all devices."""

import dataclasses
import pathlib
import sys

import cases
import jax
import numpy as np
import programs
from fault_scenarios import dispatch_of, failure_of, open_buffer, step_by_step
from jax.sharding import NamedSharding, PartitionSpec
from scenarios import World, bits, expert_mesh, spread

import jax_ep


def absent_rank(world: World) -> dict:
    """The last process stays away from an operation; then all reset the buffer and go on."""
    meet = step_by_step(world)
    buffer, case = open_buffer(timeout_s=1.5, mode=world.settings.get("mode", "high_throughput"))
    run = dispatch_of(buffer, case)
    before = bits(run())
    meet()
    is_last = world.process == world.num_processes - 1
    failed = None if is_last else failure_of(lambda: _checked(buffer, run))
    meet()
    told = failure_of(lambda: _checked(buffer, run))
    meet()
    buffer.reset()
    healthy = failure_of(lambda: _checked(buffer, run))["type"] is None and bits(run()) == before
    meet()
    buffer.close()
    return {"run": failed, "told": told, "healthy": healthy}


def soak(world: World) -> dict:
    """Rounds of operations on changing numbers of tokens, each checked on the device."""
    sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "gpu"))
    import test_gpu_epochs

    rng = np.random.default_rng(world.settings["seed"])  # the same in every process
    num_steps, mesh = world.settings["steps"], expert_mesh(len(jax.devices()))
    mode = world.settings.get("mode", "high_throughput")
    largest = dataclasses.replace(
        test_gpu_epochs.CASE,
        R=mesh.size,
        T=max(world.settings["tokens"]),
        chunk=20 if mode == "high_throughput" else None,
    )
    config = programs.make_config(largest, timeout_s=20, mode=mode)
    replicated = NamedSharding(mesh, PartitionSpec())
    worst = 0.0
    with jax_ep.Buffer(mesh, "expert", config, backend="native") as buffer:
        runs = {}
        for num_tokens in world.settings["tokens"] * world.settings["rounds"]:
            case = dataclasses.replace(largest, T=num_tokens)
            run = runs.setdefault(num_tokens, test_gpu_epochs.make_soak(buffer, case, num_steps))
            inputs = cases.make_inputs(case, rng)
            weights = inputs.topk_weights / inputs.topk_weights.sum(1, keepdims=True)
            first_expert = rng.integers(case.E, size=len(inputs.x)).astype(np.int32)
            keys = rng.integers(2**31, size=num_steps).astype(np.int32)
            keys[rng.integers(num_steps, size=2)] = 0  # nobody has anything to send
            arguments = [spread(mesh, array) for array in (inputs.x, first_expert, weights)]
            arguments.append(jax.make_array_from_callback(keys.shape, replicated, keys.__getitem__))
            found = run(*arguments)
            errors = [np.asarray(shard.data) for shard in found.addressable_shards]
            worst = float(np.max([worst, *map(np.max, errors)]))  # NaN stays
        buffer.check()
        stats = buffer.stats()
        module, window_bytes = buffer.native_module.__name__, buffer.window_bytes
    return {
        "worst": worst,
        "epochs": min(stats["dispatch_epochs"], stats["combine_epochs"]),
        "module": module,
        "window_bytes": window_bytes,
    }


def buffers_in_turn(world: World) -> dict:
    """Buffers of two sizes, one after the other, and two at once: which windows they take."""
    mesh = expert_mesh(len(jax.devices()))
    given_back, sound = [], []

    def make(num_tokens: int) -> tuple[jax_ep.Buffer, cases.Case]:
        case = cases.Case(name="turn", T=num_tokens, H=32, K=2, E=8, R=mesh.size)
        config = programs.make_config(case, timeout_s=10)
        return jax_ep.Buffer(mesh, "expert", config, backend="native"), case

    def use(buffer: jax_ep.Buffer, case: cases.Case) -> None:
        sound.append(failure_of(lambda: _checked(buffer, dispatch_of(buffer, case)))["type"])

    meet = step_by_step(world)
    for num_tokens in (16, 16, 48, 16):
        buffer, case = make(num_tokens)
        use(buffer, case)
        meet()
        buffer.close()
        meet()
        given_back.append(len(buffer.native_module.windows_given_back()))
    first, second = make(16), make(16)
    for buffer, case in (first, second, first):
        use(buffer, case)
    meet()
    for buffer, _ in (first, second):
        buffer.close()
    given_back.append(len(buffer.native_module.windows_given_back()))
    return {"given_back": given_back, "sound": sound}


def refused(world: World) -> dict:
    """A buffer that NVSHMEM has no room for; all processes hear it."""
    mesh = expert_mesh(len(jax.devices()))
    # More than any GPU has, since NVSHMEM's heap may grow.
    case = cases.Case(name="huge", T=65_535, H=1 << 16, K=2, E=8, R=mesh.size, chunk=65_535)
    config = programs.make_config(case)
    return failure_of(lambda: jax_ep.Buffer(mesh, "expert", config, backend="native"))


def _checked(buffer: jax_ep.Buffer, run) -> None:
    """On GPUs an operation that was launched raises nothing; the buffer tells."""
    run()
    buffer.check()
