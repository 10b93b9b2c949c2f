"""What is measured: points, which are a shape, a number of multiprocessors, systems and operations.

``DEFAULT`` is in order of importance, so that a budget cuts the least important. The systems made
of ``jax.lax`` know nothing of ``num_sms`` and have points of their own, at a few shapes.
"""

import dataclasses
import fnmatch
import itertools
from collections.abc import Container, Iterable, Sequence

from .systems import OPS

NATIVE = ("native",)
BOTH_NATIVE = ("native", "native_unexpanded")
LOW_LATENCY = ("low_latency_compact", "low_latency_padded", "low_latency_float8")
HALVES = tuple(f"{name}_halves" for name in LOW_LATENCY)
# Counts ahead of a dispatch and rows along the routing, beside plain dispatch.
NOTIFIED = ("native", "native_notified")
NOTIFY = ("notify", "dispatch")
# Ragged takes a hundred times as long as the others, so it comes apart from them, and later.
XLA = ("padded_all_to_all", "all_gather")
RAGGED = ("ragged_all_to_all",)
ONE_RANK = ("native", "argsort")
ONE_WAY = ("dispatch", "combine")

NUM_EXPERTS = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One shape for some systems.

    Attributes:
        T, H, K, E: as in ``tests/cases.py``.
        num_sms: of our kernels; None for their default.
        systems: names.
        ops: names, of ``systems.ALL_OPS``.
    """

    T: int
    H: int = 7168
    K: int = 8
    E: int = NUM_EXPERTS
    num_sms: int | None = None
    systems: tuple[str, ...] = NATIVE
    ops: tuple[str, ...] = ONE_WAY

    @property
    def name(self) -> str:
        """For example T4096-H7168-K8-64sm; without num_sms, the systems stand last."""
        groups = {XLA: "xla", RAGGED: "ragged", LOW_LATENCY: "low_latency"}
        groups |= {NOTIFIED: "notified", HALVES: "halves"}
        systems = groups.get(self.systems, "+".join(self.systems))
        last = systems if self.num_sms is None else f"{self.num_sms}sm"
        return f"T{self.T}-H{self.H}-K{self.K}-{last}"


DEFAULT = (
    Point(T=4096, num_sms=64, systems=BOTH_NATIVE, ops=OPS),
    Point(T=4096, num_sms=24, systems=BOTH_NATIVE),
    Point(T=4096, num_sms=48),
    Point(T=1024, num_sms=64, ops=OPS),
    Point(T=4096, systems=NOTIFIED, ops=NOTIFY),
    Point(T=1024, systems=NOTIFIED, ops=NOTIFY),
    Point(T=128, systems=LOW_LATENCY),
    Point(T=8, systems=LOW_LATENCY),
    Point(T=128, systems=HALVES),
    Point(T=8, systems=HALVES),
    Point(T=128, num_sms=100, systems=LOW_LATENCY),
    Point(T=8, num_sms=100, systems=LOW_LATENCY),
    Point(T=4096, systems=XLA, ops=OPS),
    Point(T=4096, num_sms=32),
    Point(T=4096, num_sms=16),
    Point(T=1024, systems=XLA, ops=OPS),
    Point(T=8192, num_sms=64, ops=OPS),
    Point(T=128, num_sms=64, ops=OPS),
    Point(T=128, systems=XLA, ops=OPS),
    Point(T=1024, num_sms=24),
    Point(T=1024, num_sms=48),
    Point(T=8192, num_sms=24),
    Point(T=128, num_sms=24),
    Point(T=4096, systems=RAGGED, ops=OPS),
    Point(T=4096, K=4, num_sms=64),
    Point(T=4096, K=2, num_sms=64),
    Point(T=4096, H=4096, num_sms=64),
    Point(T=4096, H=2048, num_sms=64),
    Point(T=8192, systems=XLA, ops=OPS),
    Point(T=4096, K=4, num_sms=24),
    Point(T=4096, K=2, num_sms=24),
    Point(T=4096, H=4096, num_sms=24),
    Point(T=4096, H=2048, num_sms=24),
    Point(T=1024, num_sms=32),
    Point(T=1024, num_sms=16),
    Point(T=8192, num_sms=48),
    Point(T=128, num_sms=48),
    Point(T=1024, systems=RAGGED, ops=OPS),
    Point(T=128, systems=RAGGED, ops=OPS),
    Point(T=1024, K=2, num_sms=64),
    Point(T=1024, H=2048, num_sms=64),
    Point(T=8192, num_sms=32),
)

# XLA sees through a chain of takes alone, or of sums alone, and leaves most of it out; a round trip
# it has to make.
ON_ONE_RANK = tuple(
    Point(T=T, H=H, K=K, systems=ONE_RANK, ops=("roundtrip", "fwd_bwd"))
    for T, H, K in (
        (4096, 7168, 8),
        (1024, 7168, 8),
        (8192, 7168, 8),
        (4096, 2048, 8),
        (4096, 7168, 2),
        (1024, 2048, 8),
        (1024, 7168, 2),
    )
)

TOKENS = (128, 1024, 4096, 8192)
HIDDEN = (2048, 4096, 7168)
EXPERTS_PER_TOKEN = (2, 4, 8)
NUM_SMS = (16, 24, 32, 48, 64)


def default(num_ranks: int, full: bool = False) -> tuple[Point, ...]:
    """The points of a run on GPUs: the table's, or every combination."""
    if not full:
        return ON_ONE_RANK if num_ranks == 1 else DEFAULT
    shapes = [
        {"T": T, "H": H, "K": K}
        for T, H, K in itertools.product(TOKENS[::-1], HIDDEN[::-1], EXPERTS_PER_TOKEN[::-1])
    ]
    if num_ranks == 1:
        return tuple(
            Point(**shape, systems=ONE_RANK, ops=("roundtrip", "fwd_bwd")) for shape in shapes
        )
    native = [
        Point(**shape, num_sms=num_sms, systems=BOTH_NATIVE, ops=OPS)
        for shape in shapes
        for num_sms in NUM_SMS[::-1]
    ]
    alternatives = [
        Point(**shape, systems=systems, ops=OPS) for systems in (XLA, RAGGED) for shape in shapes
    ]
    return (*native, *alternatives)


def choose(
    points: Iterable[Point],
    patterns: Sequence[str] | None = None,
    systems: Sequence[str] | None = None,
    ops: Sequence[str] | None = None,
) -> tuple[Point, ...]:
    """Points whose names match a shell pattern, cut down to these systems and operations.

    Raises:
        ValueError: nothing is left.
    """
    points = tuple(points)
    chosen = []
    for point in points:
        if patterns and not any(fnmatch.fnmatch(point.name, pattern) for pattern in patterns):
            continue
        kept = dataclasses.replace(
            point,
            systems=tuple(name for name in point.systems if not systems or name in systems),
            ops=tuple(op for op in point.ops if not ops or op in ops),
        )
        if kept.systems and kept.ops:
            chosen.append(kept)
    if not chosen:
        raise ValueError(
            f"no point is left of --points {patterns}, --systems {systems} and --ops {ops}; "
            f"there are {', '.join(point.name for point in points)}"
        )
    return tuple(chosen)


def known(points: Iterable[Point], systems: Container[str]) -> tuple[Point, ...]:
    """The points with the systems that there are."""
    return tuple(
        dataclasses.replace(point, systems=tuple(name for name in point.systems if name in systems))
        for point in points
    )


def with_peer(points: Iterable[Point], name: str) -> tuple[Point, ...]:
    """A peer beside our system, at all its points."""
    return tuple(
        dataclasses.replace(point, systems=(*point.systems, name))
        if "native" in point.systems and name not in point.systems
        else point
        for point in points
    )
