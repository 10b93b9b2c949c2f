"""What the processes of a test do together. Each function returns JSON for the test to judge."""

import dataclasses
import pathlib
import time
import zlib
from typing import Any

import case_check
import cases
import jax
import numpy as np
import programs
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jax_ep


@dataclasses.dataclass
class World:
    """One process's view of the job.

    Attributes:
        folder: of the job, for files.
        settings: what the test passed.
        num_processes, process: as jax.distributed counts them.
        leaves_at_once: whether to end without JAX's farewell.
    """

    folder: pathlib.Path
    settings: dict[str, Any]
    num_processes: int
    process: int
    leaves_at_once: bool = False

    def save(self, arrays: dict[str, np.ndarray]) -> None:
        """Writes arrays under their names and shows that they are complete."""
        np.savez(self.folder / f"{self.process}.npz", **arrays)

    def say(self, name: str) -> None:
        """Makes a file that the test waits for."""
        (self.folder / f"{name}-{self.process}").write_text("")


def expert_mesh(num_ranks: int, platform: str | None = None) -> Mesh:
    return Mesh(np.array(jax.devices(platform)[:num_ranks]), ("expert",))


def spread(mesh: Mesh, array: np.ndarray) -> jax.Array:
    """A global array, split over all axes, of what every process has whole."""
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def two_axis_mesh() -> Mesh:
    """Groups of two ranks. Where processes have two devices, none has a rank of each group."""
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "expert"))


def bits(array: jax.Array) -> list[bytes]:
    """Of this process's shards."""
    return [np.asarray(shard.data).tobytes() for shard in array.addressable_shards]


def shards(name: str, array: jax.Array) -> dict[str, np.ndarray]:
    """This process's shards as bytes, by device, since numpy's files know no bfloat16."""
    return {
        f"{name}:{shard.device.id % 2048 + (shard.device.process_index << 11)}": np.frombuffer(
            np.asarray(shard.data).tobytes(), np.uint8
        )
        for shard in array.addressable_shards
    }


def compiled(buffer: jax_ep.Buffer, program):
    """A sharded program, compiled fast: here as in the workers, and XLA does none of our sums."""
    options = {"xla_backend_optimization_level": 0}
    return jax.jit(programs.sharded(buffer, program), compiler_options=options)


def everything(buffer: jax_ep.Buffer, case: cases.Case):
    """As ``case_check.everything``, with the two sums of the combine channel in a fixed order."""
    return compiled(buffer, case_check.rank_program(buffer, case, in_order=True))


def problem_of(case: cases.Case, seed: int) -> case_check.Problem:
    """The same in every process."""
    return case_check.make_problem(
        case, np.random.default_rng((seed, zlib.crc32(case.name.encode())))
    )


def case_results(case: cases.Case, mesh: Mesh, seed: int) -> dict[str, jax.Array]:
    """All results of a case, by ranks of ``mesh``; run twice, for epochs of either parity."""
    problem = problem_of(case, seed)
    with jax_ep.Buffer(mesh, "expert", programs.make_config(case), backend="native") as buffer:
        return results_of(buffer, everything(buffer, case), problem)


def results_of(buffer: jax_ep.Buffer, run, problem) -> dict[str, jax.Array]:
    """Of two runs in a row the second's."""
    arguments = [spread(buffer.mesh, argument) for argument in problem.arguments()]
    jax.block_until_ready(run(*arguments))
    results = jax.block_until_ready(run(*arguments))
    try:
        buffer.check()
    except jax_ep.EpDataError:
        assert problem.num_faults > 0
    return results


def case_table(world: World) -> dict:
    """Runs cases by name; saves the shards of all their results."""
    table = {case.name: case for case in cases.CASES}
    saved = {}
    for name in world.settings["cases"]:
        results = case_results(table[name], expert_mesh(table[name].R), world.settings["seed"])
        for key, array in results.items():
            saved |= shards(f"{name}/{key}", array)
    world.save(saved)
    return {"cases": len(world.settings["cases"])}


MICRO_BATCHES = cases.Case(name="micro", T=64, H=64, K=2, E=16, R=4)


def micro_batches(buffer: jax_ep.Buffer, ordered: bool):
    """Two calls of a linear layer that share no data, and gradients through both."""

    def program(x, topk_idx, topk_weights, matrices):
        def outputs(x, topk_weights):
            found, previous = [], None
            for scale in (1, 2):
                routed = jax_ep.dispatch(buffer, scale * x, topk_idx, topk_weights, after=previous)
                y = jax.lax.ragged_dot(routed.tokens, matrices, routed.group_sizes)
                found.append(jax_ep.combine(buffer, y, routed))
                previous = found[-1] if ordered else None
            return found

        found, pull = jax.vjp(outputs, x, topk_weights)
        return found, pull([3 * found[0], found[1]])

    return compiled(buffer, program)


def run_micro_batches(num_times: int, ordered: bool) -> list[list[bytes]]:
    """The distinct results of so many runs, as this process's bits."""
    case, mesh = MICRO_BATCHES, expert_mesh(MICRO_BATCHES.R)
    rng = np.random.default_rng(7)
    inputs, matrices = cases.make_inputs(case, rng), programs.random_matrices(rng, case)
    found = []
    with jax_ep.Buffer(mesh, "expert", programs.make_config(case), backend="native") as buffer:
        run = micro_batches(buffer, ordered)
        arrays = (inputs.x, inputs.topk_idx, inputs.topk_weights, matrices)
        arguments = [spread(mesh, array) for array in arrays]
        for _ in range(num_times):
            results = jax.tree.leaves(jax.block_until_ready(run(*arguments)))
            seen = [part for array in results for part in bits(array)]
            if seen not in found:
                found.append(seen)
    return found


def micro(world: World) -> dict:
    found = run_micro_batches(world.settings["times"], world.settings["ordered"])
    return {"found": [[part.hex() for part in bits_of_run] for bits_of_run in found]}


def train(world: World) -> dict:
    """Some steps of the example's model, a checkpoint, and what comes back from it."""
    from moe_lm import data, training
    from moe_lm.checkpoint import Checkpoints
    from moe_lm.records import History
    from moe_lm.settings import Settings

    settings = Settings(**world.settings["model"])
    corpus = data.load_corpus()
    mesh = training.expert_mesh(len(jax.devices()))
    time.sleep(world.settings.get("late_s", {}).get(str(world.process), 0))
    with training.open_buffer(settings, mesh, "native") as buffer:
        trainer = training.Trainer(settings, buffer)
        reports = list(training.train_steps(trainer, corpus, 0, settings.steps))
        buffer.check()
    with Checkpoints(world.folder / "saved", settings) as checkpoints:
        checkpoints.save(settings.steps, trainer.state, History())
        restored, _, step = checkpoints.restore(trainer.state)
    same = jax.tree.map(lambda a, b: bits(a) == bits(b), restored, trainer.state)
    return {
        "losses": [report.loss for report in reports],
        "restored": all(jax.tree.leaves(same)) and step == settings.steps,
    }
