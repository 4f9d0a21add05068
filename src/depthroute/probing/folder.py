"""A saved model in, what its queries learned out: every probe that fits its scheme, in one pass over held-out text."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthroute.data.sources import documents
from depthroute.data.tokenization import Encoder, load_tokenizer, vocabulary_size
from depthroute.files import new_file, write_text
from depthroute.models.causal_lm import DepthRoutedForCausalLM
from depthroute.models.saved import load_saved, saved_folder
from depthroute.probing.collinearity import CollinearityProbe
from depthroute.probing.disagreement import DisagreementProbe
from depthroute.probing.heads import HeadProbe
from depthroute.probing.text_pass import Observer, pass_over
from depthroute.residual import DepthRead

RECORD = "probe.json"

_LONGEST_SEQUENCE = 2048
_CHARACTERS_PER_TOKEN = 16  # more than any text needs: what lies beyond is not worth tokenising


def probe_folder(
    folder: str | Path,
    *,
    text: str | Path | Sequence[str | Path] | None = None,
    tokens: int = 2**16,
    sequence_length: int | None = None,
    slices: int = 4,
    draws: int = 8,
    seed: int = 0,
    out: str | Path | None = None,
) -> dict[str, Any]:
    """Probe a saved model with its own tokenizer, and write what was found into probe.json.

    Args:
        folder: a run folder (its `final/` is probed) or a model folder.
        text: a source of `depthroute.data.documents` (of a hub dataset its split "validation"); the held-out part of
            the embedded corpus by default. Its two halves share no document.
        tokens: how many to look at, at most.
        sequence_length: of the model's input; what a run was trained on by default, else the model's own limit, at
            most 2,048.
        slices, draws, seed: as in `subspace_disagreement`.
        out: the file to write; `folder`/probe.json by default.

    Returns what is written: about the model, the text and the device; `collinearity` as `source_collinearity`,
    `heads` as `head_maps`, and `disagreement` as `subspace_disagreement`, None for H > 1. On the GPU where there is
    one. Raises FileNotFoundError where there is no model, tokenizer or text; ValueError for a scheme without reads, a
    tokenizer with more tokens than the model, and values out of range; TypeError for another kind of model.
    """
    for name, value in ("tokens", tokens), ("sequence_length", sequence_length):
        if value is not None and value < 2:
            raise ValueError(f"{name} is {value}; wanted at least 2")
    folder = Path(folder).expanduser()
    place = folder / RECORD if out is None else new_file(out, "out")
    environment = _environment()
    saved = saved_folder(folder)
    source = "embedded" if text is None else text
    texts = documents(source, split="validation")
    first = next(texts)  # so that a text that is not there, or cannot be read, is told before the model is loaded
    model, tokenizer = _load(saved)
    num_heads = _route_heads(model, folder)
    length = _length(model, folder, sequence_length)
    batches = sequences_in_halves(itertools.chain([first], texts), Encoder(tokenizer), tokens, length)
    disagreement = DisagreementProbe(slices=slices, draws=draws, seed=seed) if num_heads == 1 else None
    heads, collinearity = HeadProbe(draws=draws, seed=seed), CollinearityProbe()
    probes: list[Observer] = [heads, collinearity]
    if disagreement is not None:
        probes.append(disagreement)
    counted = pass_over(model, batches, *probes)
    result = {
        "model": _model_name(folder),
        "residual": model.config.residual,
        "num_heads": num_heads,
        "text": _name(source),
        "tokens": sum(counted),
        "sequence_length": length,
        "device": model.device.type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "environment": environment,
        "collinearity": collinearity.result(model, sum(counted)),
        "disagreement": None if disagreement is None else disagreement.result(model, sum(counted)),
        "heads": heads.result(model, counted),
    }
    write_text(place, json.dumps(result, indent=1, allow_nan=False) + "\n")
    return result


def _load(source: Path) -> tuple[Any, Any]:
    tokenizer = load_tokenizer(source)
    model = load_saved(source)
    if not isinstance(model, DepthRoutedForCausalLM):
        raise TypeError(f"folder: {source} holds a {type(model).__name__}; wanted a DepthRoutedForCausalLM")
    if vocabulary_size(tokenizer) > model.config.vocab_size:
        raise ValueError(
            f"folder: the tokenizer in {source} has {vocabulary_size(tokenizer)} tokens, "
            f"the model only {model.config.vocab_size}"
        )
    device: Any = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device).eval(), tokenizer


def _length(model: Any, folder: Path, wanted: int | None) -> int:
    positions = model.config.max_position_embeddings
    length = wanted or _trained_length(folder) or min(_LONGEST_SEQUENCE, positions)
    if length > positions:
        raise ValueError(f"sequence_length is {length}; the model in {folder} has {positions} positions")
    return length


def _trained_length(folder: Path) -> int | None:
    """The sequence length in the recipe of a run; positions beyond it say nothing about what was learned."""
    recipe = folder / "recipe.yaml"
    if not recipe.is_file():
        return None
    import yaml

    try:
        return int(yaml.safe_load(recipe.read_text(encoding="utf-8"))["data"]["sequence_length"])
    except (yaml.YAMLError, KeyError, TypeError, ValueError):
        raise ValueError(f"folder: {recipe} holds no data.sequence_length; give sequence_length") from None


def _route_heads(model: Any, folder: Path) -> int:
    reads = [module for module in model.model.residual.modules() if isinstance(module, DepthRead)]
    if not reads:
        scheme = model.config.residual["scheme"]
        raise ValueError(f"folder: the model in {folder} has the scheme {scheme!r}, which reads nothing over depth")
    return reads[0].num_heads


def sequences_in_halves(texts: Iterable[str], encode: Encoder, tokens: int, length: int) -> Iterator[dict[str, Tensor]]:
    """Batches for `pass_over` of one sequence of at most `length` tokens each, `tokens` in all where there are so many.

    A document goes to the half that has fewer tokens so far, so that the halves share no document.
    """
    room = [tokens - tokens // 2, tokens // 2]
    left: list[list[int]] = [[], []]
    for text in texts:
        half = int(room[1] > room[0])
        (ids,) = encode([text[: _CHARACTERS_PER_TOKEN * room[half]]])
        left[half] += ids[: room[half]].tolist()
        room[half] -= min(len(ids), room[half])
        while len(left[half]) >= length:
            yield _sequence(left[half][:length], half)
            del left[half][:length]
        if not any(room):
            break
    for half, rest in enumerate(left):
        if rest:
            yield _sequence(rest, half)


def _sequence(ids: list[int], half: int) -> dict[str, Tensor]:
    return {"input_ids": torch.tensor([ids]), "half": torch.tensor([half])}


def _model_name(folder: Path) -> str:
    path = folder.resolve()
    return path.parent.name if path.name == "final" else path.name


def _environment() -> dict[str, Any]:
    try:
        from depthroute.training.environment import describe_code_and_device
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"probing a folder needs {error.name}: pip install 'depthroute[train]'", name=error.name
        ) from error
    return describe_code_and_device()


def _name(source: str | Path | Sequence[str | Path]) -> str:
    """A name of the text that does not tell where it lay on this machine."""
    if source == "embedded":
        return "the embedded corpus, held-out documents"
    names = [source] if isinstance(source, str | Path) else list(source)
    return ", ".join(Path(name).name if Path(name).is_absolute() else str(name) for name in names)
