"""Jobs of `bench train` at a tiny size on the CPU."""

from __future__ import annotations

from dataclasses import replace

from depthroute.bench.arm import Job

OVERRIDES = {"vocab_size": 64, "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8,
             "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
JOB = Job("tiny", "additive", "autocast", 1, 8, 2, compiled=False, overrides=OVERRIDES, device="cpu")


def jobs(*schemes, **changes):
    return [replace(JOB, scheme=scheme, **changes) for scheme in schemes]
