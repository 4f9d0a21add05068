"""A saved model, as it was saved or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import AutoModelForCausalLM

from depthroute.errors import nearest_path
from depthroute.models.causal_lm import DepthRoutedForCausalLM  # noqa: F401  (registers the model)

_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def saved_folder(folder: str | Path) -> Path:
    """Where the model of a folder lies: in `final/` of a run folder, or in the folder itself.

    Raises FileNotFoundError where there is no model, or none with its tokenizer beside it.
    """
    place = Path(folder)
    if not place.is_dir():
        raise FileNotFoundError(f"folder: no model in {folder}, which is no folder{nearest_path(place)}")
    source = place / "final" if (place / "final").is_dir() else place
    if not (source / "config.json").is_file():
        raise FileNotFoundError(f"folder: no model in {folder}, there is no config.json")
    if not any((source / name).is_file() for name in _TOKENIZERS):
        raise FileNotFoundError(f"folder: the model in {source} has no tokenizer beside it")
    return source


def load_saved(source: str | Path, **options: Any) -> Any:
    """The causal language model in a folder, or of a name on the hub; `options` are those of `from_pretrained`.

    Raises ValueError for a damaged weight file, and where the files lack a weight: transformers starts that anew and
    warns, and whatever is then read off the model is of a model that nobody saved.
    """
    loader: Any = AutoModelForCausalLM
    try:
        model, report = loader.from_pretrained(source, output_loading_info=True, **options)
    except SafetensorError as error:
        raise ValueError(f"{source}: its weights are not a whole safetensors file: {error}") from error
    if missing := sorted(map(str, report["missing_keys"])):
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ValueError(f"{source}: its weights lack {missing[0]!r}{more}")
    return model
