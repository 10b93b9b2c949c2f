"""One process of a job: joins it, runs scenarios as they are asked for, writes what they return."""

import json
import os
import pathlib
import sys
import time

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "processes"), str(TESTS.parent / "examples")]

import fault_scenarios  # noqa: E402
import gpu_scenarios  # noqa: E402
import jax  # noqa: E402  (after the path)
import leaving_scenarios  # noqa: E402
import low_latency_scenarios  # noqa: E402
import mode_scenarios  # noqa: E402
import scenarios  # noqa: E402
import training_scenarios  # noqa: E402

MODULES = (
    scenarios,
    mode_scenarios,
    low_latency_scenarios,
    fault_scenarios,
    leaving_scenarios,
    training_scenarios,
    gpu_scenarios,
)


def main() -> None:
    address, processes, process, own_gpus, late_s = sys.argv[1:]
    time.sleep(float(late_s))
    local_devices = [int(gpu) for gpu in own_gpus.split(",")] if own_gpus else None
    jax.distributed.initialize(address, int(processes), int(process), local_devices)
    for line in sys.stdin:
        name, folder, settings = json.loads(line)
        world = scenarios.World(pathlib.Path(folder), settings, int(processes), int(process))
        print(f"--- {name} in {folder}", flush=True)
        run = next(getattr(module, name) for module in MODULES if hasattr(module, name))
        results = run(world)
        written = world.folder / f"{world.process}.part"
        written.write_text(json.dumps(results))
        written.rename(world.folder / f"{world.process}.json")
        sys.stdout.flush()
        if world.leaves_at_once:
            # JAX's own farewell waits for processes that will not come.
            os._exit(0)


if __name__ == "__main__":
    main()
