"""From a recipe and a tokenizer to the model before its first step."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerFast

from depthroute.data.tokenization import vocabulary_size
from depthroute.models import DepthRoutedConfig, DepthRoutedForCausalLM
from depthroute.models.presets import decoder_config
from depthroute.training.pretrained import load_pretrained
from depthroute.training.recipe import Recipe


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> DepthRoutedForCausalLM:
    """The model that a recipe starts from, in fp32 on the CPU: a checkpoint's, or an untrained one.

    The weights of an untrained one come from torch's global generator. Its vocabulary is exactly the tokenizer's, so
    that no row of the embedding is there for nothing and the first loss is near log(vocabulary);
    `model.decoder.vocab_size` sets a larger, rounder number where kernels want one. The special tokens are the
    tokenizer's. The positions reach over `data.sequence_length` at least.
    Raises ValueError where the recipe's own numbers, or the checkpoint's, are too small for the tokenizer or the
    sequences, and what `load_pretrained` raises.
    """
    if recipe.model.checkpoint is not None:
        model = load_pretrained(recipe.model.checkpoint, recipe.residual)
        _check_fits(model.config, recipe, tokenizer)
        return model
    return _fresh_model(recipe, tokenizer)


def _fresh_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> DepthRoutedForCausalLM:
    assert recipe.model.preset is not None, "a recipe has a preset where it has no checkpoint"
    fields: dict[str, Any] = {
        "vocab_size": vocabulary_size(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    preset = decoder_config(recipe.model.preset)
    fields["max_position_embeddings"] = max(preset.max_position_embeddings, recipe.data.sequence_length)
    for name, least in (("vocab_size", fields["vocab_size"]), ("max_position_embeddings", recipe.data.sequence_length)):
        given = recipe.model.decoder.get(name, least)
        if given < least:
            raise ValueError(f"model.decoder.{name} is {given}, but should be at least {least}")
    decoder = decoder_config(recipe.model.preset, **{**fields, **recipe.model.decoder})
    # For batches of prompts alone. The decoder is told of none: its row would start at zero, and packed texts have no
    # padding.
    config: Any = DepthRoutedConfig(decoder=decoder, residual=recipe.residual)
    config.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return DepthRoutedForCausalLM(config)


def _check_fits(config: DepthRoutedConfig, recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> None:
    words, length = vocabulary_size(tokenizer), recipe.data.sequence_length
    if words > config.vocab_size:
        raise ValueError(
            f"data.tokenizer {recipe.data.tokenizer!r} has {words} tokens, but model.checkpoint "
            f"{recipe.model.checkpoint!r} only {config.vocab_size}"
        )
    if length > config.max_position_embeddings:
        raise ValueError(
            f"data.sequence_length is {length}, but model.checkpoint {recipe.model.checkpoint!r} has only "
            f"{config.max_position_embeddings} positions"
        )
