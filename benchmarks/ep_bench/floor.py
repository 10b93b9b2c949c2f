"""The speed of light: bytes that must cross the link and the memory, over the rates of each.

Rows only are counted, on the busiest rank. Over the link goes each token once to each remote rank
that needs it, in each direction at once (``Sizes.wire_rows``). Memory must at least be read where
inputs are and written where results go: dispatch reads its tokens and writes the expanded rows;
combine reads all rows, and the sums for other ranks arrive in memory and are read again before the
result is written. For T=4096, H=7168, K=8, E=256 in bfloat16 on 2 H200s that is 158 us of wire, and
of memory 123 us for dispatch and 150 us for combine.
"""

import dataclasses

from .workload import Sizes


@dataclasses.dataclass(frozen=True)
class Rates:
    """Bytes a second of one device: over its link in one direction, and of its memory in all."""

    link: float
    memory: float


# Link: bulk copies to the peer, both directions at once, with all multiprocessors. Memory: nine
# tenths of the 4.8 TB/s on the H200's sheet; a plain copy reads and writes 1.96 TB/s each.
RATES = {"NVIDIA H200": Rates(link=371e9, memory=4.3e12)}

# Operations as the phases that they are made of; fwd_bwd's last one is dispatch's gradient.
PHASES = {
    "dispatch": ("dispatch",),
    "combine": ("combine",),
    "roundtrip": ("dispatch", "combine"),
    "fwd_bwd": ("dispatch", "combine", "combine_grad", "combine"),
    "notify": (),  # moves no rows
}


def memory_rows(phase: str, sizes: Sizes, expanded: bool = True) -> int:
    """Rows that a phase moves through memory on the busiest rank.

    Args:
        phase: "dispatch", "combine", or "combine_grad", which reads the tokens' cotangents and y
            and writes y's cotangents.
        sizes: of the workload.
        expanded: whether dispatch writes a row for each (token, expert), or one for each message.
    """
    written = sizes.rows if expanded else sizes.messages
    return {
        "dispatch": sizes.T + written,
        "combine": sizes.rows + 2 * sizes.wire_rows + sizes.T,
        "combine_grad": sizes.T + 2 * sizes.rows,
    }[phase]


def floor_us(op: str, sizes: Sizes, itemsize: int, rates: Rates, expanded: bool = True) -> float:
    """Microseconds below which nothing can stay: of every phase, the slower of link and memory."""
    row_bytes = sizes.H * itemsize
    seconds = (
        max(
            sizes.wire_rows * row_bytes / rates.link,
            memory_rows(phase, sizes, expanded) * row_bytes / rates.memory,
        )
        for phase in PHASES[op]
    )
    return 1e6 * sum(seconds)
