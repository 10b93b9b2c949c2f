"""Everything that defines one training run."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes, schedule and seed of a run; two runs with equal settings give equal losses.

    Token counts are global: ``batch_size`` sequences of ``seq_len`` bytes make one step, however
    many ranks share them.
    """

    # model
    hidden: int = 128
    num_layers: int = 3
    num_heads: int = 4
    num_experts: int = 16
    num_experts_per_tok: int = 2
    ffn_size: int = 128
    capacity_factor: float | None = 1.5
    # optimisation
    steps: int = 600
    batch_size: int = 8
    seq_len: int = 128
    learning_rate: float = 3e-3
    warmup_steps: int = 20
    weight_decay: float = 0.05
    aux_loss_weight: float = 0.05
    seed: int = 0
    # measuring
    validate_every: int = 50
    validation_batches: int = 16

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_len
