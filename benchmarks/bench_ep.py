"""Times dispatch, combine, round trip and forward+backward, beside what ``jax.lax`` offers.

    python benchmarks/bench_ep.py            # 2 and 8 virtual CPU devices: 4 minutes, 2 quiet cores
    python benchmarks/bench_ep.py --quick    # does it work and count, not how fast is it
    python benchmarks/bench_ep.py --ranks 8 --shape 1024,1024,2,16 --json out

All systems dispatch to identical expert-major rows and combine to the same sums, which every run
checks, and their inputs and capacity are the same. Times are slopes between a short and a long
chain of operations inside one jitted program; the number of calls in the compiled HLO is checked.
Each number of ranks runs in a process of its own, with as many devices.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
# For cases.py, the table of shapes for tests and benchmarks.
sys.path.append(str(HERE.parent / "tests"))

RANKS = (2, 8)


def main() -> None:
    """Measures every number of ranks in a subprocess, and shows and writes what it says."""
    options = _options()
    if options.worker:
        _work(options)
        return
    directory = options.json
    if directory is None and not (options.quick or options.shape or options.systems):
        directory = HERE / "results"
    for num_ranks in options.ranks or (RANKS[:1] if options.quick else RANKS):
        _measure_in_subprocess(num_ranks, options.seed, directory)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog="Without --json, only full runs (no --quick, --shape or --systems) write results, "
        "to benchmarks/results.",
    )
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", help=f"numbers of devices (default {RANKS})")
    add("--shape", type=_shape, action="append", help="T,H,K,E; may be given again")
    add("--systems", nargs="+", help="names in ep_bench/systems.py")
    add("--dtype", default="float32", help="type of the rows")
    add("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    add("--json", type=pathlib.Path, metavar="DIR", help="where to write <device>-x<ranks>.json")
    add("--quick", action="store_true", help="one shape and two repeats")
    add("--worker", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def _shape(text: str) -> tuple[int, ...]:
    numbers = tuple(map(int, text.split(",")))
    if len(numbers) != 4:
        raise argparse.ArgumentTypeError(f"{text!r} has {len(numbers)} numbers; pass T,H,K,E")
    return numbers


def _measure_in_subprocess(num_ranks: int, seed: int, directory: pathlib.Path | None) -> None:
    from ep_bench import report

    # XLA takes the last of repeated flags.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={num_ranks}"
    command = [sys.executable, __file__, *sys.argv[1:]]
    command += ["--worker", str(num_ranks), "--seed", str(seed)]
    environment, records = {}, []
    with subprocess.Popen(
        command,
        env=os.environ | {"XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        for line in process.stdout:
            if not environment:
                environment = json.loads(line)
                continue
            records.append(json.loads(line))
            if not sys.stderr.isatty():
                continue
            done = "{op} {system} T={T} K={K} E={E} R={R}".format(**records[-1])
            print(f"\r{done:<70}", end="\r", file=sys.stderr, flush=True)
    if process.returncode:
        sys.exit(f"measuring {num_ranks} ranks failed, exit status {process.returncode}")
    report.show(environment, records)
    if directory is not None:
        print(f"wrote {report.write_json(directory, environment, records)}")


def _work(options: argparse.Namespace) -> None:
    """In the subprocess: prints the environment and then each record, one JSON object a line."""
    import cases
    from ep_bench import measure, report, systems, timing

    unknown = set(options.systems or ()) - set(systems.SYSTEMS)
    if unknown:
        sys.exit(f"--systems {sorted(unknown)} are not known; choose from {list(systems.SYSTEMS)}")
    named = [(case.T, case.H, case.K, case.E) for case in cases.BENCHMARK_CASES]
    settings = measure.Settings(
        shapes=options.shape or (named[:1] if options.quick else named),
        systems=options.systems or systems.DEFAULT_SYSTEMS,
        dtype=options.dtype,
        seed=options.seed,
        lengths=(1, 2) if options.quick else (1, 5),
        limits=timing.Limits(2, 2, 0.0) if options.quick else timing.Limits(5, 40, 3.0),
    )
    print(json.dumps(report.environment(options.worker, options.seed)), flush=True)
    for record in measure.measure(options.worker, settings):
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
