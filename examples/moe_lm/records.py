"""What a run leaves behind: a report per step, and the losses by step."""

import dataclasses
from typing import Self


@dataclasses.dataclass(frozen=True)
class StepReport:
    """One finished step as the host sees it. Shares are relative to balance: 1 is an equal load."""

    step: int
    loss: float
    smallest_share: float
    largest_share: float
    dropped_share: float
    tokens_per_second: float


@dataclasses.dataclass
class History:
    """Nats per byte: of the training batch before each step, of validation after some of them."""

    train: dict[int, float] = dataclasses.field(default_factory=dict)
    validation: dict[int, float] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict:
        return {
            name: [[step, loss] for step, loss in losses.items()]
            for name, losses in dataclasses.asdict(self).items()
        }

    @classmethod
    def from_json(cls, values: dict) -> Self:
        return cls(**{name: dict(map(tuple, losses)) for name, losses in values.items()})
