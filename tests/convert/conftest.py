"""Tiny random checkpoints on disk."""

from __future__ import annotations

import pytest
from transformers import GenerationConfig

from depthroute.data import load_tokenizer
from support.models import move_off_init, stock

# Nothing at its default: rope base, eps, GQA and (for Qwen3) the head width by support.models, these on top.
VARIANTS = {
    "qwen3": {"attention_bias": True},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {},  # has biases by itself
    "mistral": {"sliding_window": 4},
}


@pytest.fixture
def original():
    """original(family, **overrides): a stock model with every parameter, biases too, away from its initial value."""

    def make(family="llama", **overrides):
        return move_off_init(stock(family, **{**VARIANTS[family], **overrides}))

    return make


@pytest.fixture
def checkpoint(tmp_path, original):
    """checkpoint(family, **overrides): the folder of such a model, with its generation configuration.

    `shard` is the largest size of a file, `tokenizer` adds the embedded one, `dtype` casts the weights.
    """

    def make(family="llama", *, shard="5GB", tokenizer=False, dtype=None, **overrides):
        if tokenizer:
            overrides = {"vocab_size": 2048, **overrides}
        model = original(family, **overrides).to(dtype)
        model.generation_config = GenerationConfig(max_new_tokens=7, do_sample=True, top_k=3, eos_token_id=[2, 3])
        folder = tmp_path / "source" / family
        model.save_pretrained(folder, max_shard_size=shard)
        if tokenizer:
            load_tokenizer("embedded").save_pretrained(folder)
        return folder

    return make
