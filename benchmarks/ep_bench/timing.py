"""Slopes of chained programs, measured in turns."""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping

SLOW_S = 0.3


@dataclasses.dataclass(frozen=True)
class Slope:
    """Time of one operation, in microseconds.

    Attributes:
        us: median of the repeats' slopes.
        us_low, us_high: their quartiles.
        cpu_us: median slope of the processor time that all threads of the process used; on a
            machine shared with others it says more than time.
        repeats: number of slopes.
    """

    us: float
    us_low: float
    us_high: float
    cpu_us: float
    repeats: int


@dataclasses.dataclass(frozen=True)
class Limits:
    """How long to measure: a number of repeats between these, until ``seconds`` are spent.

    Up to ``warm_ups`` runs of every program come before: on GPUs, XLA records a graph of a program
    only when it has run a few times. Two of slow ones have to do.

    With no end, ``seconds`` being infinite, no number of runs depends on time: several processes
    must run the same.
    """

    min_repeats: int
    max_repeats: int
    seconds: float
    warm_ups: int = 0

    @property
    def endless(self) -> bool:
        return math.isinf(self.seconds)


def fixed(repeats: int, warm_ups: int) -> Limits:
    """As often, however long it takes."""
    return Limits(repeats, repeats, math.inf, warm_ups)


def slopes(
    programs: Mapping[str, Mapping[int, Callable[[], object]]], limits: Limits
) -> dict[str, Slope]:
    """Times every system's short and long chain once in each repeat, so that noise hits all alike.

    Args:
        programs: for each system, by chain length, a call that returns when the work is done; two
            lengths each.
        limits: when to stop.
    """
    for by_length in programs.values():
        for program in by_length.values():
            _warm_up(program, limits.warm_ups, SLOW_S if not limits.endless else math.inf)
    samples = {name: [] for name in programs}
    names = list(programs)
    start = time.perf_counter()
    for repeat in range(limits.max_repeats):
        if repeat >= limits.min_repeats and time.perf_counter() - start > limits.seconds:
            break
        for turn in range(len(names)):
            name = names[(repeat + turn) % len(names)]
            samples[name].append(_slope(programs[name]))
    return {name: _summary(pairs) for name, pairs in samples.items()}


def _warm_up(program: Callable[[], object], most: int, slow_s: float) -> None:
    start = time.perf_counter()
    for run in range(most):
        if run >= 2 and time.perf_counter() - start > slow_s:
            return
        program()


def _slope(by_length: Mapping[int, Callable[[], object]]) -> tuple[float, float]:
    short, long = sorted(by_length)
    (wall_short, cpu_short), (wall_long, cpu_long) = (
        _once(by_length[length]) for length in (short, long)
    )
    operations = long - short
    return (wall_long - wall_short) / operations, (cpu_long - cpu_short) / operations


def _once(call: Callable[[], object]) -> tuple[float, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


def _summary(pairs: list[tuple[float, float]]) -> Slope:
    wall = sorted(1e6 * pair[0] for pair in pairs)
    low, _, high = statistics.quantiles(wall, n=4) if len(wall) > 1 else wall * 3
    return Slope(
        us=statistics.median(wall),
        us_low=low,
        us_high=high,
        cpu_us=statistics.median(1e6 * pair[1] for pair in pairs),
        repeats=len(wall),
    )
