"""A saved model as lm-eval sees it: what was saved, with its own tokenizer and its own context."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from transformers import AutoConfig
from transformers.utils import logging

from depthroute.errors import nearest
from depthroute.models.saved import load_saved, saved_folder

DTYPES = ("auto", "float32", "bfloat16", "float16")

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
# By name: what else lies in the folder (the card, the results themselves) changes without the model being another.
_TOKENIZER = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.*", "merges.txt", "*.model", "*.tiktoken", "tekken.json"),
)


@dataclass(frozen=True)
class SavedModel:
    """A model folder, and the sha256 of its files of each kind, by which results are known to be its own.

    The weights alone do not tell models apart: the scheme has settings that no weight shows, as the heads of a route.
    """

    name: str
    folder: Path
    weights: str
    config: str | None
    tokenizer: str | None
    generation_config: str | None  # what `generate` takes where lm-eval's task says nothing, a repetition penalty say
    max_length: int


def find_models(folders: Sequence[str | Path]) -> list[SavedModel]:
    """The models in some folders: a model folder, or a run folder (its `final/`), each under a name of its own.

    Raises FileNotFoundError for one without a model or a tokenizer, ValueError for one that is given twice.
    """
    places = [Path(folder).expanduser() for folder in folders]
    resolved = [saved_folder(place).resolve() for place in places]
    for index, path in enumerate(resolved):
        if path in resolved[:index]:
            raise ValueError(f"folders: {places[index]} is given twice")
    return [_saved_model(name, path) for name, path in zip(_names(resolved), resolved, strict=True)]


def check_options(batch_size: int, dtype: str) -> None:
    """Raise ValueError for what no model can be loaded with."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype: unknown {dtype!r}{nearest(dtype, DTYPES)}")
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; wanted at least 1")


def load_model(model: SavedModel, batch_size: int, dtype: str) -> HFLM:
    """The model for lm-eval, on the GPU where there is one; ValueError where its weights are not whole."""
    check_options(batch_size, dtype)
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # of the weights' way from the file
    try:
        load_saved(model.folder, device_map="meta")  # lm-eval goes on with what transformers makes of missing weights
        return HFLM(
            pretrained=str(model.folder),
            backend="causal",
            device="cuda" if torch.cuda.is_available() else "cpu",
            dtype=dtype,
            batch_size=batch_size,
            max_length=model.max_length,
        )
    finally:
        if shown:
            logging.enable_progress_bar()


def describe_model(model: SavedModel) -> dict[str, Any]:
    """For JSON, without the place on this machine."""
    return {key: value for key, value in asdict(model).items() if key != "folder"}


def _saved_model(name: str, folder: Path) -> SavedModel:
    weights = _fingerprint(folder, _WEIGHTS)
    if weights is None:
        raise FileNotFoundError(f"folder: the model in {folder} has no weights")
    return SavedModel(
        name=name,
        folder=folder,
        weights=weights,
        config=_fingerprint(folder, ["config.json"]),
        tokenizer=_fingerprint(folder, _TOKENIZER),
        generation_config=_fingerprint(folder, ["generation_config.json"]),
        max_length=_context(folder),
    )


def _context(folder: Path) -> int:
    config: Any = AutoConfig.from_pretrained(folder)
    try:
        return int(config.max_position_embeddings)
    except AttributeError:
        raise ValueError(f"folder: {folder} has a configuration without max_position_embeddings, its context") from None


def _fingerprint(folder: Path, patterns: Iterable[str]) -> str | None:
    """The sha256 over the files of some names; None where there are none."""
    files = sorted({file for pattern in patterns for file in folder.glob(pattern)})
    if not files:
        return None
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as data:
            digest.update(hashlib.file_digest(data, "sha256").digest())
    return digest.hexdigest()


def _names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell the folders apart; `run/final-ema` goes by the name run-ema."""
    places = [
        folder.parent.with_name(folder.parent.name + folder.name.removeprefix("final"))
        if folder.name in ("final", "final-ema")
        else folder
        for folder in folders
    ]
    parts = [place.parts[1:] for place in places]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["-".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{name}-{index}" for index, name in enumerate(names, 1)]
