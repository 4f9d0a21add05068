"""The tensors of a checkpoint, checked by their headers before any of them is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from depthroute.convert.key_maps import TIED_HEAD, TIED_TO, KeyMap
from depthroute.errors import nearest

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Weight:
    """One tensor that is still to be read.

    where: what to name in an error, the file as a rule.
    read: gives the tensor, in memory of its own, on the CPU.
    """

    where: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


def weights_of_folder(folder: Path) -> dict[str, Weight]:
    """The tensors of the safetensors files of a folder, by key; reads their headers only.

    Raises FileNotFoundError for a missing file or shard; ValueError for a damaged one, a key in two shards, a key
    that the index promises and its shard does not hold, and tensors that are not plain floating-point numbers.
    """
    table = table_of_folder(folder)
    if table.name == SINGLE:
        return _weights_of_file(table)
    promised = _read_index(table)
    weights: dict[str, Weight] = {}
    for name in sorted(set(promised.values())):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name}: this shard is missing; {INDEX} names it")
        for key, weight in _weights_of_file(folder / name).items():
            if key in weights:
                raise ValueError(f"{weight.where}: key {key!r} is also in {weights[key].where}")
            weights[key] = weight
    for key, name in promised.items():
        if key not in weights or weights[key].where != str(folder / name):
            raise ValueError(f"{folder / name}: key {key!r} is missing; {INDEX} says that it is there")
    return weights


def table_of_folder(folder: Path) -> Path:
    """The file that says which keys a folder holds: the one safetensors file, or the index of its shards."""
    for name in (SINGLE, INDEX):
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"{folder}: there is neither {SINGLE} nor {INDEX}{_other_weights(folder)}")


def weights_of_module(module: nn.Module, where: str) -> dict[str, Weight]:
    """The tensors of a loaded model, a shared one under its first key; reading one makes a copy.

    Raises ValueError for tensors that are not plain floating-point numbers in memory.
    """
    weights: dict[str, Weight] = {}
    seen: set[int] = set()
    for key, tensor in module.state_dict().items():
        if tensor.is_meta:
            raise ValueError(f"{where}: key {key!r} is on the meta device: there is nothing to copy")
        if tensor.dtype not in _DTYPES.values():
            raise ValueError(_quantised(where, key, _name(tensor.dtype)))
        if tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        copy = partial(tensor.detach().to, device="cpu", copy=True)
        weights[key] = Weight(where, tuple(tensor.shape), tensor.dtype, copy)
    return weights


def apply_key_map(weights: Mapping[str, Weight], key_map: KeyMap) -> tuple[dict[str, Weight], dict[str, str]]:
    """The weights under our names, and the keys that were dropped with the reason for each."""
    kept, dropped = {}, {}
    for key, weight in weights.items():
        if reason := key_map.reason_to_drop(key):
            dropped[key] = reason
        else:
            kept[key_map.rename(key)] = weight
    return kept, dropped


def drop_tied_head(weights: dict[str, Weight], dropped: dict[str, str]) -> None:
    """Move the head of a tied model from `weights` to `dropped`; ValueError where it is not the embedding."""
    if TIED_HEAD not in weights or TIED_TO not in weights:
        return
    head, embedding = weights[TIED_HEAD], weights[TIED_TO]
    if head.shape != embedding.shape or not torch.equal(head.read(), embedding.read()):
        raise ValueError(
            f"{head.where}: key {TIED_HEAD!r} differs from {TIED_TO!r}, but the configuration has "
            "tie_word_embeddings: true"
        )
    del weights[TIED_HEAD]
    dropped[TIED_HEAD] = f"equal to {TIED_TO}, to which the configuration ties it"


def check_keys(weights: Mapping[str, Weight], wanted: Mapping[str, tuple[int, ...]], where: str, model: str) -> None:
    """Raise ValueError unless there is exactly the wanted set of keys, each with its shape."""
    unknown = [key for key in weights if key not in wanted]
    if unknown:
        file = weights[unknown[0]].where
        hint = nearest(unknown[0], wanted).partition(" (known")[0]
        raise ValueError(f"{file}: unknown key {unknown[0]!r}{_and_more(unknown)}: {model} has no such parameter{hint}")
    missing = [key for key in wanted if key not in weights]
    if missing:
        raise ValueError(f"{where}: key {missing[0]!r}{_and_more(missing)} is missing: {model} needs it")
    for key, shape in wanted.items():
        if weights[key].shape != tuple(shape):
            raise ValueError(
                f"{weights[key].where}: key {key!r} has shape {list(weights[key].shape)}, "
                f"but the configuration wants {list(shape)}"
            )


def one_dtype(weights: Mapping[str, Weight]) -> torch.dtype:
    """The dtype of all of them; ValueError where they have several."""
    (first, expected), *rest = weights.items()
    for key, weight in rest:
        if weight.dtype != expected.dtype:
            raise ValueError(
                f"{weight.where}: key {key!r} has dtype {_name(weight.dtype)}, but {first!r} has "
                f"{_name(expected.dtype)}: choose one for the model with dtype"
            )
    return expected.dtype


def _weights_of_file(path: Path) -> dict[str, Weight]:
    weights = {}
    try:
        file = safe_open(path, framework="pt")
        for key in file.keys():  # noqa: SIM118  (not a dictionary)
            header = file.get_slice(key)
            kind = header.get_dtype()
            if kind not in _DTYPES:
                raise ValueError(_quantised(str(path), key, kind))
            read = partial(_copy_from, file, key)
            weights[key] = Weight(str(path), tuple(header.get_shape()), _DTYPES[kind], read)
    except SafetensorError as error:
        raise ValueError(f"{path}: not a whole safetensors file: {error}") from error
    return weights


def _copy_from(file: Any, key: str) -> Tensor:
    # A copy, since the tensor itself is a view of the file.
    return file.get_tensor(key).clone()


def _read_index(path: Path) -> dict[str, str]:
    try:
        promised = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not an index of shards: {type(error).__name__}: {error}") from error
    if not isinstance(promised, dict) or not promised:
        raise ValueError(f"{path}: not an index of shards: its weight_map is empty")
    return promised


def _other_weights(folder: Path) -> str:
    other = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in folder.glob(pattern))
    if not other:
        return ""
    hint = "name the .gguf file itself" if other[0].endswith(".gguf") else "save it as safetensors first"
    return f", but {other[0]}: {hint}"


def _quantised(where: str, key: str, dtype: str) -> str:
    return f"{where}: key {key!r} has dtype {dtype}: only float64, float32, float16 and bfloat16 can be converted"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _and_more(keys: list[str]) -> str:
    return f" (and {len(keys) - 1} more)" if len(keys) > 1 else ""
