"""Decoder configurations by name: the shapes of the paper, and a tiny one for a laptop."""

from __future__ import annotations

import math
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import Qwen3Config
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig

from depthroute.errors import nearest

# Qwen3-style decoders (arXiv 2607.27230, table of models). With the tied embedding of 151,936 words they hold 116 M,
# 199 M, 533 M and 1,079 M parameters. The paper gives no FFN width for 124m: 2304 is ours.
_COLUMNS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
)
_SIZES = ("vocab_size", *_COLUMNS)
_PRESETS = {
    "tiny": (128, 6, 8, 4, 16, 384, 1024),
    "100m": (512, 12, 8, 4, 64, 1536, 2048),
    "124m": (768, 12, 12, 4, 64, 2304, 2048),
    "350m": (1024, 24, 16, 8, 64, 4096, 1024),
    "1b": (1280, 36, 16, 8, 80, 5120, 1024),
}
_SHARED: dict[str, Any] = {
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
}


def available() -> tuple[str, ...]:
    """The names of all presets."""
    return tuple(_PRESETS)


def decoder_config(name: str, **overrides: Any) -> PreTrainedConfig:
    """The decoder configuration of a preset; `overrides` replace its fields (vocab_size=..., num_hidden_layers=...).

    Raises ValueError for an unknown preset or field, and for values that no decoder can have.
    """
    if name not in _PRESETS:
        raise ValueError(f"preset: unknown preset {name!r}{nearest(str(name), _PRESETS)}")
    preset: dict[str, Any] = {**_SHARED, **dict(zip(_COLUMNS, _PRESETS[name], strict=True))}
    known = Qwen3Config(**preset).to_dict()
    for key in overrides:
        if key not in known:
            raise ValueError(f"decoder: unknown field {key!r}{nearest(key, known)}")
    if overrides.get("model_type", config_type := Qwen3Config.model_type) != config_type:
        raise ValueError(f"decoder.model_type is {overrides['model_type']!r}, but a preset is a {config_type} decoder")
    _check_numbers(overrides)
    try:
        config = Qwen3Config(**{**preset, **overrides})
    except StrictDataclassError as error:
        raise ValueError(f"decoder: {error}") from None
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if kv_heads and heads % kv_heads:
        raise ValueError(
            f"decoder.num_attention_heads is {heads}, but must be a multiple of num_key_value_heads = {kv_heads}"
        )
    if config.hidden_act not in ACT2FN:
        raise ValueError(f"decoder.hidden_act: unknown {config.hidden_act!r}{nearest(config.hidden_act, ACT2FN)}")
    return config


def _check_numbers(overrides: dict[str, Any]) -> None:
    """What the configuration takes, and only a forward trips over, or nothing does; types are its own to check."""
    for key, value in overrides.items():
        if key in _SIZES and isinstance(value, int) and value < 1:
            raise ValueError(f"decoder.{key} is {value}, but must be a whole number >= 1")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"decoder.{key} is {value}, but must be a finite number")
    if isinstance(width := overrides.get("head_dim"), int) and width % 2:
        raise ValueError(f"decoder.head_dim is {width}, but must be even: rotary positions turn pairs of channels")
    if isinstance(eps := overrides.get("rms_norm_eps"), float) and eps <= 0:
        raise ValueError(f"decoder.rms_norm_eps is {eps}, but must be a number > 0")
