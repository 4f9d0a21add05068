"""A stock checkpoint becomes a depth-routed model."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from depthroute import residual as schemes
from depthroute.convert.assembly import as_dtype, assemble, stock_model
from depthroute.convert.gguf import load_gguf
from depthroute.convert.key_maps import KEY_MAPS
from depthroute.convert.sources import Source, check_model_type, decoder_of_folder, is_gguf, locate
from depthroute.convert.weights import (
    Weight,
    apply_key_map,
    check_keys,
    drop_tied_head,
    one_dtype,
    table_of_folder,
    weights_of_folder,
    weights_of_module,
)
from depthroute.models import DepthRoutedConfig, DepthRoutedForCausalLM


@dataclass(frozen=True)
class Converted:
    """A converted model, and the keys of the checkpoint that it has no use for, each with the reason."""

    model: DepthRoutedForCausalLM
    dropped: dict[str, str]


def convert_checkpoint(
    source: Source, *, residual: dict[str, Any], dtype: torch.dtype | str | None = None
) -> DepthRoutedForCausalLM:
    """The depth-routed model that starts from a pretrained decoder.

    With `delta_mhar` it computes exactly what the decoder did; with `mhar` and `block_mhar` the same up to rounding,
    since `read_scale` is `sum` here unless `residual` says `mean`. The weights are copies, those of a loaded model too:
    training one model leaves the other alone. All that the decoder's configuration says holds on (rope, norms' eps,
    tying, biases, sliding windows), and its generation configuration comes along.

    Args:
        source: a local folder with config.json and safetensors files (one, or shards and their index); the name of
            such a repository on the hub; a GGUF file; or a loaded stock model with its head.
        residual: the scheme and its options, as in `DepthRoutedConfig`.
        dtype: of the weights; None keeps that of the checkpoint (fp32 for a GGUF file).

    Raises FileNotFoundError for a missing folder, file or shard; ValueError for an unsupported architecture, a
    missing or unknown key, a wrong shape, a damaged file, several dtypes where none is chosen, and unknown schemes
    or options; TypeError for arguments of a wrong type. Each is one line that names the file and the key.
    """
    return convert(locate(source), with_sums(residual), as_dtype(dtype)).model


def with_sums(residual: dict[str, Any]) -> dict[str, Any]:
    """`residual` with `read_scale: sum` where the scheme has a read scale and none is given.

    The default of a configuration, `mean`, is a fresh model's: the read is a part of the stream, which the norms behind
    it undo but for their eps. A converted model is to start as the original.
    """
    try:
        scaled = {"read_scale": "sum", **residual}
        schemes.check(scaled)
    except (ValueError, TypeError):  # no such option; what else is wrong is said where the model is made
        return residual
    return scaled


def convert(place: Path | PreTrainedModel, residual: dict[str, Any], dtype: torch.dtype | None) -> Converted:
    """The model of a folder, a GGUF file or a loaded model under a `residual` that is taken as it is."""
    if isinstance(place, PreTrainedModel):
        return _convert_model(place, residual, dtype)
    if is_gguf(place):
        return _convert_model(load_gguf(place), residual, dtype)
    decoder = decoder_of_folder(place)
    config = DepthRoutedConfig(decoder=decoder, residual=residual)
    converted = _convert_weights(config, weights_of_folder(place), str(table_of_folder(place)), dtype)
    if (place / "generation_config.json").is_file():
        converted.model.generation_config = GenerationConfig.from_pretrained(place)
    return converted


def _convert_model(source: PreTrainedModel, residual: dict[str, Any], dtype: torch.dtype | None) -> Converted:
    where = f"the loaded {type(source).__name__}"
    check_model_type(source.config.model_type, where)
    decoder: PreTrainedConfig = copy.deepcopy(source.config)
    wanted, _ = stock_model(decoder)
    if type(source) is not wanted:
        raise ValueError(f"{where}: it must be a {wanted.__name__}, the decoder with its language-model head")
    if hasattr(decoder, "quantization_config"):
        del decoder.quantization_config  # how the file stored them; weights that still are quantised are refused below
    config = DepthRoutedConfig(decoder=decoder, residual=residual)
    attention = source.config._attn_implementation
    converted = _convert_weights(config, weights_of_module(source, where), where, dtype, attention)
    model: Any = converted.model
    model.to(source.device)
    model.generation_config = copy.deepcopy(source.generation_config)
    return converted


def _convert_weights(
    config: DepthRoutedConfig,
    weights: dict[str, Weight],
    where: str,
    dtype: torch.dtype | None,
    attention: str | None = None,
) -> Converted:
    weights, dropped = apply_key_map(weights, KEY_MAPS[config.decoder.model_type])
    if config.tie_word_embeddings:
        drop_tied_head(weights, dropped)
    kind, wanted = stock_model(config.decoder)
    check_keys(weights, wanted, where, kind.__name__)
    chosen = one_dtype(weights) if dtype is None else dtype
    return Converted(assemble(DepthRoutedForCausalLM, config, weights, chosen, attention), dropped)
