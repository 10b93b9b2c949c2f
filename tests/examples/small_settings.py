"""A model and a run small enough to be trained many times in a test."""

from moe_lm.settings import Settings

SMALL = Settings(
    hidden=32,
    num_layers=2,
    num_heads=2,
    num_experts=8,
    ffn_size=32,
    steps=20,
    batch_size=8,
    seq_len=16,
    warmup_steps=4,
    validate_every=8,
    validation_batches=2,
)
