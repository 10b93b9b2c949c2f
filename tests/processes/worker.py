"""One process of a job: joins it, runs a scenario, writes what it returns."""

import json
import os
import pathlib
import sys

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "processes"), str(TESTS.parent / "examples")]

import fault_scenarios  # noqa: E402
import gpu_scenarios  # noqa: E402
import jax  # noqa: E402  (after the path)
import scenarios  # noqa: E402


def main() -> None:
    name, folder, settings, address, processes, process = sys.argv[1:]
    world = scenarios.World(
        folder=pathlib.Path(folder),
        settings=json.loads(settings),
        num_processes=int(processes),
        process=int(process),
    )
    world.before_joining()
    gpus = world.settings["gpus"]
    own_gpu = [world.process % gpus] if gpus else None
    jax.distributed.initialize(address, world.num_processes, world.process, own_gpu)
    modules = (scenarios, fault_scenarios, gpu_scenarios)
    found = next(getattr(module, name) for module in modules if hasattr(module, name))
    results = found(world)
    (world.folder / f"{world.process}.json").write_text(json.dumps(results))
    sys.stdout.flush()
    if world.leaves_at_once:
        # JAX's own farewell waits for processes that will not come.
        os._exit(0)


if __name__ == "__main__":
    main()
