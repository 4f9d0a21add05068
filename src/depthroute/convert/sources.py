"""Where a checkpoint comes from: a local folder, the hub, a GGUF file, a loaded model."""

from __future__ import annotations

import json
import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from depthroute.convert.key_maps import KEY_MAPS
from depthroute.errors import nearest_path
from depthroute.models.configuration import DepthRoutedConfig

Source = str | Path | PreTrainedModel

# Everything that belongs beside the weights: the tokenizer in all its forms, how to generate, the licence.
COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "tekken.json",
    "chat_template*",
    "generation_config.json",
    "LICENSE*",
    "NOTICE*",
)

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


def locate(source: Source) -> Path | PreTrainedModel:
    """The folder, GGUF file or loaded model that `source` names; a name on the hub becomes its local copy.

    Raises FileNotFoundError where there is nothing by that name, ValueError for a file of another kind, TypeError for
    anything but a name, a path or a transformers model.
    """
    if isinstance(source, PreTrainedModel):
        return source
    if isinstance(source, nn.Module) or not isinstance(source, str | Path):
        raise TypeError(f"source is {type(source).__name__}, but must be a path, a hub name or a transformers model")
    path = Path(source).expanduser()
    if path.is_dir() or is_gguf(path):
        return path
    if path.is_file():
        raise ValueError(f"{path}: this file is no checkpoint; wanted a folder, a .gguf file or a hub name")
    if isinstance(source, Path) or not _HUB_NAME.fullmatch(source):
        raise FileNotFoundError(f"{source}: no such folder or file{nearest_path(path)}")
    try:
        return Path(snapshot_download(source, allow_patterns=["config.json", "model*.safetensors*", *COMPANIONS]))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"{source}: neither a folder here nor a repository of the hub that can be reached{nearest_path(path)} "
            f"({first_line(error)})"
        ) from error


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file."""
    return path.suffix == ".gguf" and path.is_file()


def decoder_of_folder(folder: Path) -> PreTrainedConfig:
    """The stock configuration of the decoder in a folder.

    Raises FileNotFoundError where there is none; ValueError where it cannot be read, for an architecture that is not
    supported, and for adapters and quantised weights.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file, so {folder} is not a checkpoint")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        check_model_type(values.get("model_type"), str(path))
        if "quantization_config" in values:
            raise ValueError("quantization_config: quantised weights cannot be converted, dequantise them first")
        if (folder / "adapter_config.json").is_file():
            raise ValueError("adapter_config.json lies beside it: merge the adapter into the weights first")
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (ValueError, TypeError, AttributeError, KeyError, StrictDataclassError) as error:
        reason = first_line(error)
        raise ValueError(reason if reason.startswith(str(path)) else f"{path}: {reason}") from error


def check_model_type(model_type: object, where: str) -> None:
    """Raise ValueError for an architecture that cannot be converted."""
    if model_type == DepthRoutedConfig.model_type:
        raise ValueError(
            f"{where}: the model is depth-routed already; depthroute.convert.to_stock(model) "
            "makes a stock model of it where that is exact"
        )
    if model_type not in KEY_MAPS:
        raise ValueError(
            f"{where}: model_type is {model_type!r}, but must be one of {', '.join(KEY_MAPS)}: "
            "only decoders whose blocks are known to be pre-norm can be routed"
        )


def first_line(error: BaseException) -> str:
    """An error as one line."""
    return " ".join((str(error).strip() or type(error).__name__).split())
