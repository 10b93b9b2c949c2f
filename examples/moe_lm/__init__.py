"""A byte-level mixture-of-experts language model, trained by ``examples/train_moe_lm.py``."""
