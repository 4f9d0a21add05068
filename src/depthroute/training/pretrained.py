"""Models that start from a checkpoint: a stock decoder, converted on the way, or a depth-routed model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.configuration_utils import PreTrainedConfig

from depthroute import residual as schemes
from depthroute.convert.assembly import assemble
from depthroute.convert.from_hf import convert
from depthroute.convert.sources import decoder_of_folder, locate
from depthroute.convert.weights import TIED_HEAD, check_keys, weights_of_folder
from depthroute.models import DepthRoutedConfig, DepthRoutedForCausalLM


def load_pretrained(checkpoint: str, residual: dict[str, Any]) -> DepthRoutedForCausalLM:
    """The model of a checkpoint under a residual scheme, in fp32 on the CPU. Draws no random numbers.

    Raises FileNotFoundError where there is nothing by that name; ValueError in one line for what cannot be converted,
    for files that are damaged or do not hold exactly the model's weights, and for a depth-routed checkpoint that has
    another `residual`.
    """
    place = locate(checkpoint)
    if isinstance(place, Path) and _is_routed(place):
        return _load_routed(place, residual)
    return convert(place, residual, torch.float32).model


def decoder_at_hand(checkpoint: str) -> PreTrainedConfig | None:
    """The decoder's configuration of a checkpoint folder on this machine; None for any other checkpoint."""
    folder = Path(checkpoint).expanduser()
    if not folder.is_dir():
        return None
    return _routed_config(folder).decoder if _is_routed(folder) else decoder_of_folder(folder)


def _is_routed(folder: Path) -> bool:
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # the conversion says what is wrong with it
    return isinstance(values, dict) and values.get("model_type") == DepthRoutedConfig.model_type


def _routed_config(folder: Path) -> DepthRoutedConfig:
    return DepthRoutedConfig.from_pretrained(folder)


def _load_routed(folder: Path, residual: dict[str, Any]) -> DepthRoutedForCausalLM:
    config = _routed_config(folder)
    wanted = schemes.resolve(residual, config.decoder)
    if config.residual != wanted:
        raise ValueError(f"model.checkpoint {folder} has the residual {config.residual}, but the recipe has {wanted}")
    with torch.device("meta"):
        empty = DepthRoutedForCausalLM(config)
    shapes = {key: tuple(value.shape) for key, value in empty.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes[TIED_HEAD]
    weights = weights_of_folder(folder)
    check_keys(weights, shapes, str(folder), "the model of its config.json")
    model: DepthRoutedForCausalLM = assemble(DepthRoutedForCausalLM, config, weights, torch.float32)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model
