"""A checkpoint folder in, a depth-routed model folder out, with a check of what the conversion changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import depthroute
from depthroute.convert import check as checking
from depthroute.convert.assembly import as_dtype
from depthroute.convert.card import STARTS, conversion_card
from depthroute.convert.from_hf import Converted, convert, with_sums
from depthroute.convert.gguf import gguf_tokenizer, load_gguf
from depthroute.convert.sources import COMPANIONS, Source, first_line, is_gguf, locate
from depthroute.models.card import CARD
from depthroute.residual import Residual

RECORD = "conversion.json"

_SAMPLE = "In 2019, 1234 people's letters:  \n\n  'Où est-il?' - \"Здесь.\"\t(see § 4.2) <s></s> 你好\n"


def convert_folder(
    source: Source,
    destination: str | Path,
    residual: dict[str, Any],
    dtype: torch.dtype | str | None = None,
    check: bool = True,
    max_shard_size: str = "5GB",
) -> dict[str, Any]:
    """Convert a checkpoint and write the model, its tokenizer, a record and a model card into a new folder.

    The folder appears in one step when all is written and checked: a failure leaves nothing, a kill at most a hidden
    folder `.<name>.partial` beside it, which the next conversion to the same place removes.

    Args:
        source, residual, dtype: as in `convert_checkpoint`.
        destination: a folder that does not exist yet, or is empty.
        check: run both models on real text, see `compare`; on the GPU where there is one.
        max_shard_size: of one safetensors file.

    Returns what is written to conversion.json: where the model came from, the scheme, the keys that were dropped,
    the versions, and the check (`describe_conversion` puts it into lines).
    Raises as `convert_checkpoint` does; ValueError for a destination that holds something and for a tokenizer that
    does not survive; RuntimeError where a scheme that starts exact deviates in fp32.
    """
    destination = Path(destination).expanduser()
    _refuse_occupied(destination)
    wanted = as_dtype(dtype)
    place = locate(source)
    original = load_gguf(place) if isinstance(place, Path) and is_gguf(place) else place
    converted = convert(original, with_sums(residual), wanted)
    with _appearing_at(destination) as draft:
        model = converted.model
        model.save_pretrained(draft, max_shard_size=max_shard_size)
        tokenizer = _bring_tokenizer(place, draft)
        record = _record(_name(source, place), converted)
        if check:
            record["check"] = _check(original, model, tokenizer)
        (draft / RECORD).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        (draft / CARD).write_text(conversion_card(destination.name, record), encoding="utf-8")
    return record


def starts_as(residual: Residual) -> str:
    """How near the original a fresh scheme starts: "exact", "up_to_rounding", "up_to_eps" (of the norms) or "not"."""
    if getattr(residual.options, "read_scale", None) == "sum":
        return "up_to_rounding"
    return residual.identity_at_init or "not"


def describe_conversion(record: dict[str, Any]) -> str:
    """The record of a conversion in a few lines for the screen."""
    residual = ", ".join(f"{key} {value}" for key, value in record["residual"].items() if key != "scheme")
    lines = [
        f"{record['source']} ({record['architecture']}, {record['dtype']}, {record['parameters']:,} parameters)"
        f" -> {record['residual']['scheme']} ({residual}), {record['residual_parameters']:,} of them new"
    ]
    lines.append(STARTS[record["starts"]])
    lines += [f"dropped {key}: {reason}" for key, reason in record["dropped_keys"].items()]
    lines.append(checking.describe(record["check"]) if "check" in record else "not checked against the original")
    return "\n".join(lines)


def _refuse_occupied(destination: Path) -> None:
    if destination.is_dir() and any(destination.iterdir()):
        raise ValueError(f"{destination}: destination is not empty; choose a new folder")
    if destination.exists() and not destination.is_dir():
        raise ValueError(f"{destination}: destination is a file; choose a new folder")


@contextmanager
def _appearing_at(destination: Path) -> Iterator[Path]:
    """A folder to write into, which takes the place of `destination` at the end, or is removed."""
    draft = destination.parent / f".{destination.name}.partial"
    if draft.exists():
        shutil.rmtree(draft)
    draft.mkdir(parents=True)
    try:
        yield draft
        draft.replace(destination)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _name(source: Source, place: Path | PreTrainedModel) -> str:
    """A name of the source that does not tell where it lay on this machine."""
    if isinstance(place, PreTrainedModel):
        return place.name_or_path or type(place).__name__
    return place.resolve().name if Path(str(source)).expanduser().exists() else str(source)


def _record(name: str, converted: Converted) -> dict[str, Any]:
    model, residual = converted.model, converted.model.model.residual
    return {
        "source": name,
        "architecture": model.config.decoder.model_type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "residual": model.config.residual,
        "starts": starts_as(residual),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "residual_parameters": sum(parameter.numel() for parameter in residual.parameters()),
        "dropped_keys": converted.dropped,
        "versions": {
            "depthroute": depthroute.__version__,
            **{name: version(name) for name in ("torch", "transformers", "safetensors")},
        },
    }


def _bring_tokenizer(place: Path | PreTrainedModel, draft: Path) -> PreTrainedTokenizerBase | None:
    """Put the tokenizer and the other companions of the weights into `draft`; returns the tokenizer."""
    if isinstance(place, PreTrainedModel):
        return None
    if is_gguf(place):
        tokenizer = gguf_tokenizer(place)
        if tokenizer is not None:
            tokenizer.save_pretrained(draft)
        return tokenizer
    for path in sorted({path for pattern in COMPANIONS for path in place.glob(pattern) if path.is_file()}):
        shutil.copyfile(path, draft / path.name)
    if not any((draft / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return None
    try:
        original = AutoTokenizer.from_pretrained(place)
    except (ValueError, OSError, KeyError, ImportError) as error:
        raise ValueError(f"{place}: its tokenizer cannot be loaded: {first_line(error)}") from error
    if _ids(draft) != original(_SAMPLE).input_ids:
        # transformers picks the class by the model type too, so the same files can make another tokenizer.
        original.save_pretrained(draft)
        if _ids(draft) != original(_SAMPLE).input_ids:
            raise ValueError(f"{place}: its tokenizer gives other ids when it is loaded for the converted model")
    return original


def _ids(folder: Path) -> list[int] | None:
    try:
        return AutoTokenizer.from_pretrained(folder)(_SAMPLE).input_ids
    except (ValueError, OSError, KeyError):
        return None


def _check(
    original: Path | PreTrainedModel, converted: Any, tokenizer: PreTrainedTokenizerBase | None
) -> dict[str, Any]:
    if isinstance(original, Path):
        stock: Any = AutoModelForCausalLM.from_pretrained(original, dtype=converted.dtype)
        stock.to(device="cuda" if torch.cuda.is_available() else "cpu")
    else:
        stock = original
    result = checking.compare(stock, converted.to(device=stock.device), tokenizer)
    deviation = result["fp32"]["largest_absolute"]
    if converted.model.residual.identity_at_init == "exact" and deviation != 0.0:
        raise RuntimeError(
            f"the converted model deviates from the original by {deviation:.3g} in fp32, but must not at all"
        )
    return result
