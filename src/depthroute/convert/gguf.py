"""GGUF files, read by transformers; refused where transformers would read them wrongly."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.gguf import read_gguf_metadata

from depthroute.convert.assembly import stock_model
from depthroute.convert.sources import check_model_type, first_line

# Metadata that changes what a decoder computes and that transformers leaves out for the supported ones.
_UNREAD = (".rope.scaling.", ".rope.scale_linear", ".attention.sliding_window")

_SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}

# How text is cut before the merges, by `tokenizer.ggml.pre`, where transformers does not know the name.
_PRE_TOKENIZERS: dict[Any, Any] = {
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
}


def load_gguf(path: Path) -> PreTrainedModel:
    """The stock model of a GGUF file, dequantised to fp32 (which holds the values of the common block types exactly).

    Raises ValueError for a damaged file, an unsupported architecture, and metadata or tensors that transformers
    would leave out; RuntimeError where the packages that read GGUF are not installed.
    """
    metadata, tensors = _read_metadata(path)
    check_model_type(metadata["general.architecture"], str(path))
    for key, value in metadata.items():
        if any(part in key for part in _UNREAD) and value not in ("none", 0):
            raise ValueError(f"{path}: {key} is set, which transformers does not read for this architecture")
    loader: Any = AutoModelForCausalLM
    try:
        model, report = loader.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, output_loading_info=True
        )
    except ImportError as error:
        raise RuntimeError(f"{path}: reading GGUF needs gguf and accelerate: pip install gguf accelerate") from error
    except (ValueError, RuntimeError, KeyError, IndexError, OSError) as error:
        raise ValueError(f"{path}: transformers cannot read it: {first_line(error)}") from error
    if report["missing_keys"]:
        raise ValueError(f"{path}: key {min(report['missing_keys'])!r} is missing")
    taken, held = len(stock_model(model.config)[1]), len(tensors)
    if taken != held:
        raise ValueError(f"{path}: it holds {held} tensors, but {type(model).__name__} takes {taken}")
    return model


def gguf_tokenizer(path: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a GGUF file, None where it has none.

    Puts right what transformers does not take from the file: the special tokens (before 5.24), and how text is cut
    for a vocabulary of the kind "smollm".
    """
    metadata, _ = _read_metadata(path)
    if "tokenizer.ggml.tokens" not in metadata:
        return None
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for name, key in _SPECIAL_TOKENS.items():
        if (index := metadata.get(f"tokenizer.ggml.{key}")) is not None:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(index))
    if pre_tokenizer := _PRE_TOKENIZERS.get(metadata.get("tokenizer.ggml.pre")):
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


def _read_metadata(path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The metadata of a GGUF file, arrays of strings as their length, and the names of its tensors."""
    try:
        return read_gguf_metadata(str(path))
    except (ValueError, IndexError, struct.error) as error:
        raise ValueError(f"{path}: not a whole GGUF file: {first_line(error)}") from error
