"""The low-latency window as an object: which regions it has, where they lie, how large it is."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from . import _native
from .config import MAX_UINT16, EpConfig, experts_per_rank, positive_int


@dataclasses.dataclass(frozen=True)
class Region:
    """A named part of one window buffer.

    Attributes:
        name: as in docs/wire-format.md.
        offset: bytes from the start of the buffer.
        size: bytes; 0 for a region that this window does not need.
    """

    name: str
    offset: int
    size: int


@dataclasses.dataclass(frozen=True)
class LowLatencyLayout:
    """Offsets and sizes of one rank's low-latency window, as the native code lays it out.

    Every number comes from the struct of ``ffi/layout/`` by which windows are allocated and
    addressed; make one with ``LowLatencyLayout.make``.

    Attributes:
        message_bytes: one token's message: its row, its source and where its rows go.
        regions: the regions of one of the two buffers, in order of their offsets.
        buffer_bytes: one buffer, a multiple of 4096.
        total_bytes: the window, which is two buffers.
        control_bytes: the control block beside the window: epochs, credits, the poison word.
    """

    message_bytes: int
    regions: tuple[Region, ...]
    buffer_bytes: int
    total_bytes: int
    control_bytes: int

    @classmethod
    def make(
        cls,
        num_max_dispatch_tokens_per_rank: int,
        hidden: int,
        num_ranks: int,
        num_experts: int,
        *,
        num_experts_per_tok: int = 8,
        dtype: Any = jnp.bfloat16,
        staging: bool = True,
        records: bool = True,
    ) -> "LowLatencyLayout":
        """Lays out a window; needs no device.

        Args:
            num_max_dispatch_tokens_per_rank: tokens that a rank may bring to one operation, the
                config's ``max_tokens_per_rank``.
            hidden: H, elements in a token's row.
            num_ranks: R, ranks in the group.
            num_experts: E, experts over all ranks; a multiple of R.
            num_experts_per_tok: K, experts a token is sent to.
            dtype: element type of the rows: float32, bfloat16 or float16.
            staging: whether some peer is reached by RDMA only, which takes send regions. Without
                them the window is about half.
            records: whether GPU kernels use the window, which keep route records beside messages.

        Raises:
            EpUsageError: an argument is outside EpConfig's limits.
        """
        num_tokens = positive_int(
            "num_max_dispatch_tokens_per_rank", num_max_dispatch_tokens_per_rank, at_most=MAX_UINT16
        )
        num_ranks = positive_int("num_ranks", num_ranks, at_most=MAX_UINT16)
        config = EpConfig(
            num_experts=num_experts,
            num_experts_per_tok=num_experts_per_tok,
            hidden=hidden,
            max_tokens_per_rank=num_tokens,
            dtype=dtype,
            mode="low_latency",
        )
        experts_per_rank(config, num_ranks)
        facts = _native.window_layout(
            num_ranks=num_ranks,
            tokens_per_epoch=config.tokens_per_epoch,
            num_experts=config.num_experts,
            num_experts_per_tok=config.num_experts_per_tok,
            row_bytes=config.row_bytes,
            staging=bool(staging),
            records=bool(records),
        )
        regions = tuple(Region(*region) for region in facts.pop("regions"))
        return cls(regions=regions, **facts)

    def region(self, name: str) -> Region:
        """The region of that name.

        Raises:
            KeyError: there is none.
        """
        return {region.name: region for region in self.regions}[name]

    def describe(self) -> str:
        """A table of the regions of one buffer, and the totals, for people."""
        rows = [(region.name, region.offset, region.size) for region in self.regions]
        width = max(len(name) for name, _, _ in rows)
        lines = [f"{'region of one buffer':{width}}  {'offset':>14}  {'bytes':>14}"]
        lines += [f"{name:{width}}  {offset:14,}  {size:14,}" for name, offset, size in rows]
        lines += [
            f"{name:{width}}  {'':14}  {size:14,}"
            for name, size in (
                ("one buffer", self.buffer_bytes),
                ("window (two buffers)", self.total_bytes),
                ("control block", self.control_bytes),
            )
        ]
        return "\n".join(lines)


def get_low_latency_rdma_size_hint(
    num_max_dispatch_tokens_per_rank: int,
    hidden: int,
    num_ranks: int,
    num_experts: int,
    *,
    num_experts_per_tok: int = 8,
    dtype: Any = jnp.bfloat16,
) -> int:
    """Bytes of one rank's low-latency window when peers are reached by RDMA; needs no device.

    The double-buffered window of GPUs with its send regions:
    ``LowLatencyLayout.make(...).total_bytes``. It is an upper bound: where every peer's memory can
    be addressed, as within one process or one NVLink domain, the send regions are absent and a
    Buffer allocates about half (``Buffer.window_bytes``).

    Args:
        num_max_dispatch_tokens_per_rank: tokens that a rank may bring to one operation, the
            config's ``max_tokens_per_rank``.
        hidden: H, elements in a token's row.
        num_ranks: R, ranks in the group.
        num_experts: E, experts over all ranks; a multiple of R.
        num_experts_per_tok: K, experts a token is sent to.
        dtype: element type of the rows: float32, bfloat16 or float16.

    Raises:
        EpUsageError: an argument is outside EpConfig's limits.
    """
    return LowLatencyLayout.make(
        num_max_dispatch_tokens_per_rank,
        hidden,
        num_ranks,
        num_experts,
        num_experts_per_tok=num_experts_per_tok,
        dtype=dtype,
    ).total_bytes
