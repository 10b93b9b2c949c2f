"""From the command line's options to points and settings; runs in the process that measures."""

import argparse
import time

import cases
import jax
import numpy as np
from jax.sharding import Mesh

from . import floor, linked, measure, peer, points, timing, workload
from .systems import GPU_ONLY, OPS, SYSTEMS, System, default_systems

QUICK_LENGTHS = (1, 2)
# Of each point, where several processes must do the same.
FIXED_REPEATS = 20
QUICK_LIMITS = timing.Limits(2, 2, 0.0)
CPU_LENGTHS = (1, 5)
CPU_LIMITS = timing.Limits(5, 40, 3.0)
GPU_LIMITS = timing.Limits(5, 40, 1.0, warm_ups=8)


def join_processes(options: argparse.Namespace) -> None:
    """Joins this process with the others, each of which has its share of the devices."""
    own = None
    if options.platform == "cuda":
        each = options.worker // options.processes
        own = list(range(options.process * each, (options.process + 1) * each))
    jax.distributed.initialize(options.address, options.processes, options.process, own)


def make_mesh(num_ranks: int) -> Mesh:
    """One axis over the first devices.

    Raises:
        ValueError: there are fewer.
    """
    devices = jax.devices()
    if len(devices) < num_ranks:
        raise ValueError(f"--ranks {num_ranks}: JAX sees {len(devices)} devices")
    return Mesh(np.array(devices[:num_ranks]), (workload.AXIS,))


def gpu_lengths(system: System, T: int) -> tuple[int, int]:
    """Chains whose difference is many times the jitter of a call, and no longer than that.

    XLA records graphs of five calls or more, so the short chain must have more too. Small
    operations are timed in loops of one graph, ten turns more or less.
    """
    if system.opaque:
        looped = (2 * linked.GRAPH + 8, 12 * linked.GRAPH + 8)
        return looped if T <= 512 else (8, 128) if T <= 1024 else (8, 68)
    return (1, 5) if T <= 1024 else (1, 3)


def make(
    options: argparse.Namespace, began: float
) -> tuple[tuple[points.Point, ...], measure.Settings]:
    """Returns what to measure and how.

    Args:
        options: of ``bench_ep.py``, in its worker.
        began: when the worker did, by ``time.monotonic``.

    Raises:
        ValueError: options name something that is not there.
    """
    on_gpus = options.platform == "cuda"
    peers = [peer.load(path) for path in options.peer]
    systems = SYSTEMS | {system.name: system for system in peers}
    unknown = set(options.systems or ()) - set(systems)
    if unknown:
        raise ValueError(f"--systems {sorted(unknown)} are not known; choose from {list(systems)}")
    not_here = set() if on_gpus else set(GPU_ONLY) & set(options.systems or ())
    if not_here:
        raise ValueError(f"--systems {sorted(not_here)} are for GPUs only; leave them out")
    if options.shape or not on_gpus:
        table = _points_of_shapes(options)
    else:
        table = points.default(options.worker, options.full)
    table = points.known(table, systems)
    for other in peers:
        table = points.with_peer(table, other.name)
    chosen = points.choose(table, options.points, options.systems, options.ops)
    if options.quick and not options.shape:
        chosen = chosen[:1]
    if options.quick:
        lengths, limits = lambda system, T: QUICK_LENGTHS, QUICK_LIMITS
    elif on_gpus:
        lengths, limits = gpu_lengths, GPU_LIMITS
    else:
        lengths, limits = lambda system, T: CPU_LENGTHS, CPU_LIMITS
    if options.processes > 1:
        limits = timing.fixed(FIXED_REPEATS, limits.warm_ups)
    budget = options.budget
    settings = measure.Settings(
        systems=systems,
        dtype=options.dtype or ("bfloat16" if on_gpus else "float32"),
        seed=options.seed,
        style=options.chain or ("data" if on_gpus else "loop"),
        lengths=lengths,
        limits=limits,
        budget_s=None if budget is None else budget - (time.monotonic() - began),
        rates=floor.RATES.get(jax.devices()[0].device_kind),
    )
    return chosen, settings


def _points_of_shapes(options: argparse.Namespace) -> tuple[points.Point, ...]:
    """On CPUs all systems of a shape in one point, measured in turns; on GPUs as in the table."""
    shapes = options.shape or [(case.T, case.H, case.K, case.E) for case in cases.BENCHMARK_CASES]
    found = []
    for T, H, K, E in shapes:
        if options.platform == "cpu" or options.worker == 1:
            named = options.systems or default_systems(options.worker)
            systems_and_sms = [(tuple(named), None)]
        else:
            systems_and_sms = [(points.BOTH_NATIVE, sms) for sms in options.num_sms or (None,)]
            systems_and_sms += [(group, None) for group in (points.XLA, points.RAGGED)]
            if "reference" in (options.systems or ()):
                systems_and_sms.append((("reference",), None))
        found += [
            points.Point(T=T, H=H, K=K, E=E, num_sms=num_sms, systems=systems, ops=OPS)
            for systems, num_sms in systems_and_sms
        ]
    return tuple(found)
