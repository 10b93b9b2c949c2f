"""Measures points in this process, which has as many devices as ranks.

Where several processes drive the ranks, all must run the same programs in the same order: with
``timing.fixed`` limits and no budget they do.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from . import chains, floor, hlo, linked, timing, workload
from .checks import Truth
from .points import Point
from .systems import Operations, System

KEPT_SHAPES = 8

# By operation, then system, then chain length.
Programs = dict[str, dict[str, dict[int, jax.stages.Compiled]]]


@dataclasses.dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        systems: by name.
        dtype: of the rows.
        seed: of the inputs.
        style: of chains, a key of ``chains.CHAINS``.
        lengths: short and long chain of a system at T tokens.
        limits: of timing.
        budget_s: seconds after which no point begins; None for no end.
        rates: of the devices, or None.
    """

    systems: Mapping[str, System]
    dtype: str
    seed: int
    style: str
    lengths: Callable[[System, int], tuple[int, int]]
    limits: timing.Limits
    budget_s: float | None = None
    rates: floor.Rates | None = None


def measure(mesh: Mesh, points: Sequence[Point], settings: Settings) -> Iterator[dict[str, Any]]:
    """Yields ``{"record": ...}``, ``{"failed": text}`` and ``{"left_out": [names]}`` of all points.

    A point is left out when the time left is less than a point of the same systems has taken. A
    system that fails does not hold up the others.
    """
    began = time.monotonic()
    run = _Run(mesh, settings)
    longest: dict[tuple[str, ...], float] = {}
    left_out = []
    for point in points:
        start = time.monotonic()
        end = start + longest.get(point.systems, 0)
        if settings.budget_s is not None and end > began + settings.budget_s:
            left_out.append(point.name)
            continue
        yield from run.measure_point(point)
        seconds = time.monotonic() - start
        longest[point.systems] = max(longest.get(point.systems, 0), seconds)
    if left_out:
        yield {"left_out": left_out}


class _Run:
    """What points share: inputs of a shape, the chain's own cost, which floors are known."""

    def __init__(self, mesh: Mesh, settings: Settings):
        self._mesh, self._settings = mesh, settings
        self._glue: dict[str, timing.Slope] = {}
        self._floors: set[tuple[str, workload.Sizes]] = set()
        self._truth = functools.lru_cache(KEPT_SHAPES)(functools.partial(_truth, mesh, settings))

    def measure_point(self, point: Point) -> Iterator[dict[str, Any]]:
        """Yields records and failures of all its systems and operations."""
        failures: list[str] = []
        with _noting(failures, "set-up"):
            truth = self._truth(point.T, point.H, point.K, point.E)
            with contextlib.ExitStack() as stack:
                opened = self._open(stack, point, truth, failures)
                for record in self._time(point, opened, truth, failures):
                    yield {"record": record}
            for record in self._floor_records(point, truth.load):
                yield {"record": record}
        for failure in failures:
            yield {"failed": f"{point.name}: {failure}"}

    def _open(self, stack, point: Point, truth: Truth, failures) -> dict[str, Operations]:
        opened = {}
        for name in point.systems:
            with _noting(failures, f"{name} set-up"):
                system = self._settings.systems[name]
                manager = system.open(truth.load, truth.mesh, point.num_sms)
                ops = stack.enter_context(manager)
                truth.check_dispatch(name, ops, system.off)
                opened[name] = ops
        return opened

    def _time(self, point: Point, opened, truth: Truth, failures) -> Iterator[dict[str, Any]]:
        settings = self._settings
        todo = {
            op: {name: ops for name, ops in opened.items() if op in settings.systems[name].ops}
            for op in point.ops
        }
        todo = {"glue": self._systems_to_glue(opened)} | todo
        programs = compile_all(todo, truth, settings, failures)
        for op, by_system in programs.items():
            slopes = {}
            with _noting(failures, op):
                slopes = _time_op(op, by_system, truth, settings)
            if op == "glue":
                self._glue |= slopes
                continue
            for name, slope in slopes.items():
                system = settings.systems[name]
                num_sms = None if system.calls is not None and not system.opaque else point.num_sms
                record = _record(op, system, num_sms, truth.load, slope, settings)
                record["glue_us"] = self._glue_us(op, system)
                if settings.style == "data":
                    record["row_copies"] = _copies(by_system[name], truth.load)
                yield record

    def _systems_to_glue(self, opened: dict[str, Operations]) -> dict[str, Operations]:
        """All; for linked chains the first alone, and once a run, for theirs do not depend on it"""
        if self._settings.style == "loop":
            return opened
        return {} if self._glue else dict(list(opened.items())[:1])

    def _glue_us(self, op: str, system: System) -> float | None:
        if self._settings.style == "loop":
            slope = self._glue.get(system.name)
        elif linked.has_glue(op, system):
            slope = next(iter(self._glue.values()), None)
        else:
            return 0.0
        return None if slope is None else round(slope.us, 1)

    def _floor_records(self, point: Point, load: workload.Workload) -> Iterator[dict[str, Any]]:
        if self._settings.rates is None:
            return
        for op in point.ops:
            if floor.PHASES[op] and (op, load.sizes) not in self._floors:
                self._floors.add((op, load.sizes))
                yield _floor_record(op, load, self._settings.rates)


def compile_all(
    todo: Mapping[str, Mapping[str, Operations]],
    truth: Truth,
    settings: Settings,
    failures: list[str],
) -> Programs:
    """Compiles the chains of operations and systems, and checks their HLO and their results.

    XLA compiles outside Python's lock, for the most part on one core a program. Only compiling is
    done side by side: two programs that run at once may starve each other's collectives.
    """
    compiling: dict[tuple[str, str], dict[int, concurrent.futures.Future]] = {}
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for op, by_system in todo.items():
            chain = chains.CHAINS[settings.style][op]
            for name, ops in by_system.items():
                compiling[op, name] = {
                    length: pool.submit(
                        chains.compile_chain, chain, ops, truth.mesh, truth.args, length
                    )
                    for length in settings.lengths(settings.systems[name], truth.load.sizes.T)
                }
    programs: Programs = {op: {} for op in todo}
    for (op, name), futures in compiling.items():
        with _noting(failures, f"{name} {op}"):
            compiled = {length: future.result() for length, future in futures.items()}
            system = settings.systems[name]
            check_hlo(op, system, compiled, truth, settings.style)
            for length, program in compiled.items():
                what, results = f"{name} {op} x{length}", program(*truth.args)
                if chains.CHAINS[settings.style][op].returns_rows:
                    truth.check_rows(what, *results, system.off)
                else:
                    truth.check_sums(what, results)
            programs[op][name] = compiled
    return programs


def check_hlo(
    op: str,
    system: System,
    compiled: Mapping[int, jax.stages.Compiled],
    truth: Truth,
    style: str,
) -> None:
    """Checks that chains hold the operations that they are timed for, and no copies of their own.

    Where XLA can look into a linked chain's system, it may combine, split or replace collectives,
    and its copies there are the system's own: then nothing is asked but that the rows travel and
    are written as often as they must.

    Raises:
        AssertionError: they do not.
    """
    if system.calls is None:
        return
    name = f"{system.name} {op}"
    texts = _texts(compiled)
    parts, sizes = chains.PARTS[op], truth.load.sizes
    if system.opaque or style == "loop":
        hlo.check_calls(name, texts, system.calls_of(parts))
        if not system.copies_rows:
            hlo.check_copies(name, texts, sizes.T * sizes.H)
        return
    if op == "glue":
        return
    # A backward pass sends rows twice.
    each = sum(1 + (part == "backward") for part in parts if system.calls[part])
    if truth.mesh.devices.flat[0].platform != "cpu":  # which removes the barriers too early
        hlo.check_row_collectives(name, texts, each, sizes.T * sizes.H)
        rows = sizes.capacity if op == "dispatch" else sizes.T
        hlo.check_arrays(name, texts, rows * sizes.H)


def _time_op(op: str, by_system, truth: Truth, settings: Settings) -> dict[str, timing.Slope]:
    if not by_system:
        return {}
    calls = {
        name: {
            length: functools.partial(_run, program, truth.args)
            for length, program in compiled.items()
        }
        for name, compiled in by_system.items()
    }
    return timing.slopes(calls, settings.limits)


def _run(program: jax.stages.Compiled, args: tuple[jax.Array, ...]) -> None:
    jax.block_until_ready(program(*args))


def _truth(mesh: Mesh, settings: Settings, T: int, H: int, K: int, E: int) -> Truth:
    R = mesh.devices.size
    case = cases.Case(name="benchmark", T=T, H=H, K=K, E=E, R=R, dtype=settings.dtype)
    rng = np.random.default_rng((settings.seed, T, H, K, E))
    return Truth(workload.make(case, rng), mesh)


@contextlib.contextmanager
def _noting(failures: list[str], name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        failures.append(f"{name}: {type(error).__name__}: {error}")


def _texts(compiled: Mapping[int, jax.stages.Compiled]) -> dict[int, str]:
    return {length: hlo.write_out_loops(program.as_text()) for length, program in compiled.items()}


def _copies(compiled: Mapping[int, jax.stages.Compiled], load: workload.Workload) -> float:
    texts = _texts(compiled)
    return hlo.added_copies(texts, load.sizes.T * load.sizes.H)


def _record(
    op: str,
    system: System,
    num_sms: int | None,
    load: workload.Workload,
    slope: timing.Slope,
    settings: Settings,
) -> dict[str, Any]:
    sizes, itemsize = load.sizes, jnp.dtype(load.case.dtype).itemsize
    wire_bytes = wire_gbps = fraction = None
    if system.wire_rows is not None:
        phases = len(floor.PHASES[op])
        wire_bytes = phases * system.wire_rows(sizes) * sizes.H * itemsize
        wire_gbps = round(wire_bytes / slope.us / 1e3, 1) if slope.us > 0 else None
    if settings.rates is not None and slope.us > 0 and floor.PHASES[op]:
        least = floor.floor_us(op, sizes, itemsize, settings.rates, system.expanded)
        fraction = round(least / slope.us, 3)
    return {
        **_identity(op, system.name, load, num_sms),
        **{field: _rounded(number) for field, number in dataclasses.asdict(slope).items()},
        "capacity": sizes.capacity,
        "wire_bytes": wire_bytes,
        "wire_gbps": wire_gbps,
        "floor_fraction": fraction,
    }


def _floor_record(op: str, load: workload.Workload, rates: floor.Rates) -> dict[str, Any]:
    itemsize = jnp.dtype(load.case.dtype).itemsize
    us = floor.floor_us(op, load.sizes, itemsize, rates)
    wire_bytes = len(floor.PHASES[op]) * load.sizes.wire_rows * load.sizes.H * itemsize
    return {
        **_identity(op, "floor", load, None),
        "us": round(us, 1),
        "wire_bytes": wire_bytes,
        "wire_gbps": round(wire_bytes / us / 1e3, 1),
        "floor_fraction": 1.0,
    }


def _identity(op: str, system: str, load: workload.Workload, num_sms) -> dict[str, Any]:
    return {
        "op": op,
        "system": system,
        **{axis: getattr(load.sizes, axis) for axis in "THKER"},
        "dtype": load.case.dtype,
        "num_sms": num_sms,
    }


def _rounded(number: float) -> float:
    return number if isinstance(number, int) else round(number, 1)
