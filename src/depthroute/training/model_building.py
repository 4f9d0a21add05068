"""From a recipe and a tokenizer to a fresh model."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerFast

from depthroute.data.tokenization import vocabulary_size
from depthroute.models import DepthRoutedConfig, DepthRoutedForCausalLM
from depthroute.models.presets import decoder_config
from depthroute.training.recipe import Recipe


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> DepthRoutedForCausalLM:
    """The untrained model of a recipe, in fp32 on the CPU. Its weights come from torch's global generator.

    The vocabulary is exactly the tokenizer's, so that no row of the embedding is there for nothing and the first loss
    is near log(vocabulary); `model.decoder.vocab_size` sets a larger, rounder number where kernels want one. The
    special tokens are the tokenizer's. The positions reach over `data.sequence_length` at least.
    Raises ValueError where the recipe's own numbers are too small for the tokenizer or the sequences.
    """
    fields: dict[str, Any] = {
        "vocab_size": vocabulary_size(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
    }
    preset = decoder_config(recipe.model.preset)
    fields["max_position_embeddings"] = max(preset.max_position_embeddings, recipe.data.sequence_length)
    for name, least in (("vocab_size", fields["vocab_size"]), ("max_position_embeddings", recipe.data.sequence_length)):
        given = recipe.model.decoder.get(name, least)
        if given < least:
            raise ValueError(f"model.decoder.{name} is {given}, but should be at least {least}")
    decoder = decoder_config(recipe.model.preset, **{**fields, **recipe.model.decoder})
    return DepthRoutedForCausalLM(DepthRoutedConfig(decoder=decoder, residual=recipe.residual))
