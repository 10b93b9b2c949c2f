"""Times dispatch, combine, round trip and forward+backward, beside what ``jax.lax`` offers.

    python benchmarks/bench_ep.py                    # all GPUs, or 2 and 8 virtual CPU devices
    python benchmarks/bench_ep.py --quick            # does it work and count, not how fast is it
    python benchmarks/bench_ep.py --ranks 1          # on one device, against jnp.argsort and take
    python benchmarks/bench_ep.py --platform cpu --ranks 8 --shape 1024,1024,2,16 --json out
    python benchmarks/bench_ep.py --list             # the points of a run on GPUs, by importance
    python benchmarks/bench_ep.py --points 'T4096-*-64sm' --ops dispatch combine --peer peer.py
    python benchmarks/bench_ep.py --processes 2 --systems native --ops dispatch combine

All systems dispatch to identical expert-major rows and combine to the same sums, which every run
checks, and their inputs and capacity are the same. Times are slopes between a short and a long
chain of operations inside one jitted program, on GPUs for small T between a short and a long loop
of one recorded graph; the number of calls in the compiled HLO is checked.
Each number of ranks runs in a process of its own, with as many devices, or with --processes in
several that share them out; those repeat each point as often as each other, and have no budget.

On GPUs (where jax_ep's CUDA module is built and JAX sees them) the default run is the table of
``ep_bench/points.py``, for as long as ``--budget`` lasts; ``--full`` measures every combination.
Every record has the time in microseconds ("us", the median), its quartiles, "wire_gbps" and
"floor_fraction". The wire's bytes are rows that cross the busiest direction of any rank's link, as
the routing drawn has it: distinct (token, remote rank) pairs times the row's bytes for systems that
send a token once to a rank, more for those that pad; a round trip crosses twice, forward+backward
four times. The floor (``ep_bench/floor.py``) is the time that link and memory need at the least; it
is a record too, and null where the device's rates are not known. "glue_us" is what the links of the
chain cost, as part of "us". Results go to <device>-x<ranks>.json, with -p<processes> where there
are several, and a picture beside it.

``--peer FILE.py`` adds another library; ``ep_bench/peer.py`` says what the file must define. Where
git does not know the sources, pass --commit, or set JAX_EP_COMMIT. The exit status is 1 if a
system failed anywhere.
"""

import argparse
import contextlib
import functools
import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
# For cases.py, the table of shapes for tests and benchmarks.
sys.path.append(str(HERE.parent / "tests"))

GPU_BUDGET_S = 480.0
# Of the budget, for the table and the picture.
LAST_SECONDS = 5.0


def main() -> None:
    """Measures every number of ranks in a subprocess, and shows and writes what it says."""
    began = time.monotonic()
    options = _options()
    if options.worker:
        _work(options)
        return
    from ep_bench import platforms

    if options.list:
        _list(options)
        return
    try:
        options.platform, num_devices = platforms.choose(options.platform)
    except ValueError as error:
        sys.exit(str(error))
    alone = options.processes == 1
    if alone and options.budget is None and options.platform == "cuda" and not options.full:
        options.budget = GPU_BUDGET_S
    all_ranks = options.ranks or platforms.default_ranks(options.platform, num_devices)
    if options.quick and not options.ranks:
        all_ranks = all_ranks[:1]
    for num_ranks in all_ranks:
        if num_ranks % options.processes:
            sys.exit(f"--processes {options.processes} cannot share {num_ranks} devices out evenly")
    failed = False
    for place, num_ranks in enumerate(all_ranks):
        share = None
        if options.budget is not None:
            left = options.budget - LAST_SECONDS - (time.monotonic() - began)
            share = max(0.0, left / (len(all_ranks) - place))
        failed |= _measure_in_subprocess(num_ranks, options, share)
    sys.exit(1 if failed else 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog="Without --json, only default and --full runs write results, to benchmarks/results: "
        "none that is --quick or narrowed by --shape, --points, --systems, --ops or --peer.",
    )
    add = parser.add_argument
    add("--platform", choices=("cpu", "cuda"), help="default: GPUs where they can be used")
    add("--ranks", type=int, nargs="+", help="numbers of devices (default: 2 and 8, or all GPUs)")
    add("--shape", type=_shape, action="append", help="T,H,K,E; may be given again")
    add(
        "--points", nargs="+", metavar="PATTERN", help="names of points on GPUs, as --list has them"
    )
    add("--list", action="store_true", help="list the points of a run on GPUs")
    add("--full", action="store_true", help="every combination, on GPUs")
    add("--systems", nargs="+", help="names in ep_bench/systems.py")
    add("--ops", nargs="+", choices=("dispatch", "combine", "roundtrip", "fwd_bwd", "notify"))
    add("--num-sms", type=int, nargs="+", help="of jax_ep's kernels, with --shape")
    add("--dtype", help="type of the rows (default: bfloat16 on GPUs, float32 on CPUs)")
    add("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    add("--budget", type=float, metavar="SECONDS", help="on GPUs 480, unless --full")
    add(
        "--peer",
        type=pathlib.Path,
        action="append",
        default=[],
        metavar="FILE.py",
        help="another library; ep_bench/peer.py says what the file must define",
    )
    add(
        "--chain",
        choices=("loop", "data"),
        help="how operations are chained (default: data on GPUs, loop on CPUs)",
    )
    add("--commit", help="what to record instead of what git says")
    add("--json", type=pathlib.Path, metavar="DIR", help="where to write <device>-x<ranks>.json")
    add("--quick", action="store_true", help="one shape and two repeats")
    add("--processes", type=int, default=1, help="that share the devices out (default: 1)")
    add("--worker", type=int, help=argparse.SUPPRESS)
    add("--process", type=int, default=0, help=argparse.SUPPRESS)
    add("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.processes < 1:
        parser.error(f"--processes {options.processes}: pass 1 or more")
    if options.processes > 1 and options.budget is not None and options.worker is None:
        parser.error("--processes cannot keep a --budget; narrow the run with --points or --shape")
    return options


def _shape(text: str) -> tuple[int, ...]:
    numbers = tuple(map(int, text.split(",")))
    if len(numbers) != 4:
        raise argparse.ArgumentTypeError(f"{text!r} has {len(numbers)} numbers; pass T,H,K,E")
    return numbers


def _list(options: argparse.Namespace) -> None:
    from ep_bench import points

    for num_ranks in options.ranks or (2,):
        for point in points.default(num_ranks, options.full):
            print(f"{point.name:<26} {' '.join(point.ops):<38} {' '.join(point.systems)}")


def _directory(options: argparse.Namespace) -> pathlib.Path | None:
    narrowed = (
        options.quick
        or options.shape
        or options.points
        or options.systems
        or options.ops
        or options.peer
    )
    return options.json or (None if narrowed else HERE / "results")


def _measure_in_subprocess(
    num_ranks: int, options: argparse.Namespace, budget: float | None
) -> bool:
    """Returns whether something failed."""
    from ep_bench import platforms, report

    command = [sys.executable, __file__, *sys.argv[1:], "--worker", str(num_ranks)]
    command += ["--seed", str(options.seed), "--platform", options.platform]
    command += ["--address", f"127.0.0.1:{platforms.free_port()}"]
    if budget is not None:
        command += ["--budget", str(budget)]
    told: dict[str, list[Any]] = {"environment": [], "record": [], "failed": [], "left_out": []}
    devices_each = num_ranks // options.processes
    environment_each = os.environ | platforms.variables(options.platform, devices_each)
    start = functools.partial(subprocess.Popen, env=environment_each, text=True)
    with contextlib.ExitStack() as stack:
        for place in range(1, options.processes):
            other = start([*command, "--process", str(place)], stdout=subprocess.DEVNULL)
            stack.callback(_end, other)
        process = stack.enter_context(start(command, stdout=subprocess.PIPE))
        for line in process.stdout:
            if not line.startswith("{"):  # a library's
                print(line, end="", file=sys.stderr)
                continue
            for kind, what in json.loads(line).items():
                told[kind] += what if isinstance(what, list) else [what]
                _show_progress(kind, what, options.platform)
    if process.returncode and (options.platform == "cpu" or not told["record"]):
        sys.exit(f"measuring {num_ranks} ranks failed, exit status {process.returncode}")
    if process.returncode:
        told["failed"].append(f"the process ended early, exit status {process.returncode}")
    environment = told["environment"][0]
    environment |= {kind: told[kind] for kind in ("failed", "left_out") if told[kind]}
    report.show(environment, told["record"])
    if told["failed"]:
        print(f"{len(told['failed'])} failures, see above", file=sys.stderr)
    if told["left_out"]:
        print(f"the budget left out {len(told['left_out'])} points:", *told["left_out"])
    directory = _directory(options)
    if directory is not None and told["record"]:
        _write(directory, environment, told["record"])
    return bool(told["failed"])


def _end(process: subprocess.Popen) -> None:
    """The first process has ended: another has a moment to do so too."""
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _show_progress(kind: str, what: Any, platform: str) -> None:
    if kind == "failed":
        print(f"failed: {what}", file=sys.stderr, flush=True)
    if kind != "record":
        return
    done = "{op} {system} T={T} H={H} K={K} E={E} R={R}".format(**what)
    if platform == "cuda":  # a log that says what was measured, should the run be cut
        sms = "" if what["num_sms"] is None else f" {what['num_sms']} SMs"
        print(f"{done}{sms}: {what['us']} us", file=sys.stderr, flush=True)
    elif sys.stderr.isatty():
        print(f"\r{done:<70}", end="\r", file=sys.stderr, flush=True)


def _write(directory: pathlib.Path, environment: dict[str, Any], records: list) -> None:
    from ep_bench import picture, report

    path = report.write_json(directory, environment, records)
    print(f"wrote {path}")
    if environment["platform"] != "gpu":
        return
    try:
        print(f"wrote {picture.draw(path, environment, records)}")
    except ImportError as error:
        print(f"drew no picture: {error}; pip install 'jax_ep[bench]' brings matplotlib")


def _work(options: argparse.Namespace) -> None:
    """In the subprocess: prints JSON objects, one a line: the environment, then what is found."""
    began = time.monotonic()
    from ep_bench import environment, measure, plan

    if options.processes > 1:
        plan.join_processes(options)
    try:
        mesh = plan.make_mesh(options.worker)
        points, settings = plan.make(options, began)
    except ValueError as error:
        sys.exit(str(error))
    facts = environment.describe(options.worker, options.seed, options.commit)
    print(json.dumps({"environment": facts}), flush=True)
    for said in measure.measure(mesh, points, settings):
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
