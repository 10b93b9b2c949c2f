"""Low latency between processes with a GPU each: float8 on the wire, and halves interleaved.

Every function that runs a program is called by one process alone, too, for the truth.
"""

import pathlib
import sys
import zlib

import cases
import jax
import numpy as np
import programs
from jax.sharding import Mesh
from scenarios import World, compiled, expert_mesh, shards, spread

import jax_ep

TESTS = pathlib.Path(__file__).resolve().parents[1]
# Groups that end early, several parts of a row, several tokens for a block; both layouts.
FLOAT8 = [
    (cases.Case(name="groups", T=7, H=200, K=3, E=8, R=2, dtype="bfloat16"), "padded", False),
    (cases.Case(name="half", T=33, H=1288, K=8, E=60, R=2, dtype="float16"), "compact", True),
    (cases.Case(name="wide", T=9, H=7168, K=8, E=32, R=2, dtype="bfloat16"), "padded", True),
    (cases.Case(name="single", T=257, H=332, K=3, E=8, R=2), "compact", False),
]
MICRO_BATCHES = cases.Case(name="micro", T=33, H=264, K=3, E=8, R=2)


def _find(folder: str) -> None:
    """Lets this process import from a folder of tests, at the end of the path."""
    if str(TESTS / folder) not in sys.path:
        sys.path.append(str(TESTS / folder))


def _rng(seed: int, name: str) -> np.random.Generator:
    """The same in every process."""
    return np.random.default_rng((seed, zlib.crc32(name.encode())))


def _open(case: cases.Case, mesh: Mesh) -> jax_ep.Buffer:
    config = programs.make_config(case, mode="low_latency", timeout_s=20)
    return jax_ep.Buffer(mesh, "expert", config, backend="native")


def float8_results(
    case: cases.Case, layout: str, split: bool, mesh: Mesh, seed: int
) -> list[dict[str, jax.Array]]:
    """Of every way to quantise: two calls with hard rows and two with others, so that each buffer
    of the window gets both."""
    _find("gpu")
    import float8_check
    import test_gpu_float8

    rng = _rng(seed, case.name)
    problems = [float8_check.hard_inputs(rng, case), cases.make_inputs(case, rng)]
    send = test_gpu_float8.send_low(layout, split)
    found = []
    with _open(case, mesh) as buffer:
        run = test_gpu_float8.all_ways(buffer, case, send)
        arrays = [[spread(mesh, a) for a in (i.x, i.topk_idx, i.topk_weights)] for i in problems]
        for arguments in (*arrays, *arrays[::-1]):
            found += jax.block_until_ready(run(*arguments))
        buffer.check()
    return found


def low_latency_float8(world: World) -> dict:
    saved = {}
    for case, layout, split in FLOAT8:
        mesh = expert_mesh(case.R)
        results = float8_results(case, layout, split, mesh, world.settings["seed"])
        for number, found in enumerate(results):
            for key, array in found.items():
                saved |= shards(f"{case.name}/{number} {key}", array)
    world.save(saved)
    return {}


def micro_batch_results(mesh: Mesh, seed: int, num_rounds: int) -> list[dict[str, jax.Array]]:
    """Start A, start B, done A, done B, of dispatch and of combine; fresh inputs in every round."""
    _find("ops")
    import test_low_latency_halves

    case, rng, found = MICRO_BATCHES, _rng(seed, MICRO_BATCHES.name), []
    with _open(case, mesh) as buffer:

        def program(*arrays):
            return test_low_latency_halves.two_micro_batches(buffer, arrays[:3], arrays[3:])

        run = compiled(buffer, program)
        for _ in range(num_rounds):
            batches = [cases.make_inputs(case, rng) for _ in range(2)]
            arrays = [a for i in batches for a in (i.x, i.topk_idx, i.topk_weights)]
            first, second = jax.block_until_ready(run(*[spread(mesh, a) for a in arrays]))
            found.append({"first": first, "second": second})
        buffer.check()
    return found


def low_latency_micro_batches(world: World) -> dict:
    saved, settings = {}, world.settings
    mesh = expert_mesh(MICRO_BATCHES.R)
    for number, found in enumerate(micro_batch_results(mesh, settings["seed"], settings["rounds"])):
        for key, array in found.items():
            saved |= shards(f"{number} {key}", array)
    world.save(saved)
    return {}
