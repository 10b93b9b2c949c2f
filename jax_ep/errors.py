"""The exceptions that jax_ep raises.

Errors of a running operation reach Python twice. JAX raises its own runtime error whose message
starts with one of the class names below; ``Buffer.check()`` then raises the class itself, with the
facts as attributes.
"""

from collections.abc import Mapping, Sequence
from typing import Any


class EpError(RuntimeError):
    """Base class of every error that jax_ep raises."""


class EpUsageError(EpError, ValueError):
    """An argument or the place of a call is wrong. Nothing was sent; the buffer stays usable."""


class _EpPeerError(EpError):
    """An operation that could not finish because of a peer.

    Attributes:
        op: name of the operation, for example ``"dispatch"``.
        group: the group of ranks in which it happened, in row-major order of the other mesh axes.
        rank: the rank that reports.
        peer: the rank it was waiting for, or whose signal did not fit.
        epoch: the epoch of the channel in which it happened.
        expected: the value that ``rank`` expected of ``peer``'s signal.
        seen: the value it saw last.
        records: one mapping per rank that reported, the one described above first.
    """

    def __init__(self, message: str, records: Sequence[Mapping[str, Any]]):
        super().__init__(message)
        self.records = tuple(dict(record) for record in records)
        first = self.records[0]
        self.op: str = first["op"]
        self.group: int = first["group"]
        self.rank: int = first["rank"]
        self.peer: int = first["peer"]
        self.epoch: int = first["epoch"]
        self.expected: int = first["expected"]
        self.seen: int = first["seen"]


class EpTimeoutError(_EpPeerError):
    """A rank waited for a peer past the buffer's deadline. ``Buffer.reset()`` mends the buffer."""


class EpMismatchError(_EpPeerError):
    """Ranks met in one epoch with different operations. ``Buffer.reset()`` mends the buffer."""


class EpDataError(EpError):
    """``topk_idx`` held entries that name no expert, or one expert twice for a token.

    Such entries were treated as -1; the results of the operations that met them are otherwise
    valid.

    Attributes:
        count: number of such entries since the last check.
        group, rank, token, k: where the first of them was.
        value: the entry itself.
        kind: ``"out_of_range"`` or ``"duplicate"``.
    """

    def __init__(
        self,
        message: str,
        *,
        count: int,
        group: int,
        rank: int,
        token: int,
        k: int,
        value: int,
        kind: str,
    ):
        super().__init__(message)
        self.count = count
        self.group = group
        self.rank = rank
        self.token = token
        self.k = k
        self.value = value
        self.kind = kind
