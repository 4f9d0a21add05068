"""Checkpoints that survive a kill at any moment: one counts only when its manifest says that it is whole.

The manifest lists every file with its size. It is written after all of them have reached the disk, and appears in one
step; so a folder without it was cut off while it was saved, and a folder that disagrees with it was damaged later.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from depthroute.files import write_json

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
SHARDS = "shards"
_FOLDER = re.compile(r"checkpoint-(\d+)")


def seal(folder: Path) -> None:
    """Mark a checkpoint, all of whose files are written, as complete."""
    sizes = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            sizes[path.relative_to(folder).as_posix()] = path.stat().st_size
    write_json(folder / MANIFEST, {"files": sizes})


def fault(folder: Path) -> str | None:
    """Why a checkpoint cannot be used; None if it can."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return f"it has no {MANIFEST}: saving it was cut off"
    try:
        sizes = json.loads(manifest.read_text(encoding="utf-8"))["files"]
    except (ValueError, KeyError, TypeError):
        return f"its {MANIFEST} cannot be read"
    for name, size in sizes.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, wanted {size}"
    return None


def last_complete(out: Path) -> Path | None:
    """The complete checkpoint of the latest step in `out`; later ones that cannot be used are named in the log."""
    for folder in reversed(checkpoints(out)):
        reason = fault(folder)
        if reason is None:
            return folder
        logger.warning("%s is not loaded: %s", folder, reason)
    return None


def checkpoints(out: Path) -> list[Path]:
    """The checkpoint folders in `out`, complete or not, by step."""
    found = (path for path in out.glob("checkpoint-*") if path.is_dir() and _FOLDER.fullmatch(path.name))
    return sorted(found, key=step_of)


def has_begun(out: Path) -> bool:
    """Whether the run in `out` has got anywhere: a checkpoint, a line of metrics, a summary."""
    files = (out / name for name in ("metrics.jsonl", "summary.json"))
    return bool(checkpoints(out)) or any(file.is_file() and file.stat().st_size for file in files)


def step_of(folder: Path) -> int:
    """The step after which a checkpoint was made."""
    match = _FOLDER.fullmatch(folder.name)
    if match is None:
        raise ValueError(f"folder is {folder}, wanted one named checkpoint-<step>")
    return int(match[1])


def rotate(out: Path, keep: int) -> None:
    """Remove all checkpoints but the last `keep` complete ones."""
    complete = [folder for folder in checkpoints(out) if fault(folder) is None]
    kept = complete[-keep:] if keep else []
    for folder in checkpoints(out):
        if folder not in kept:
            shutil.rmtree(folder)


def save_shards(folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Write a model and its optimizer, each rank its own shards; all ranks take part.

    The files do not depend on how the model is cut: `load_shards` reads them on another number of ranks, on one
    device, and under another strategy.
    """
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizer)
    save_tensors(folder / SHARDS, {"model": weights, "optimizer": moments})


def load_shards(folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
    """Give a model and its optimizer what `save_shards` has written; all ranks take part."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments}
    load_tensors(folder / SHARDS, state)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def save_tensors(folder: Path, state: dict[str, Any]) -> None:
    """Write a nested dictionary of tensors, sharded ones too, by torch.distributed.checkpoint."""
    from torch.distributed import checkpoint, is_initialized

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as we say ourselves
        checkpoint.save(state, checkpoint_id=folder, no_dist=not is_initialized())


def load_tensors(folder: Path, state: dict[str, Any]) -> None:
    """Read into the tensors of such a dictionary, each rank what its shards need."""
    from torch.distributed import checkpoint, is_initialized

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as we say ourselves
        checkpoint.load(state, checkpoint_id=folder, no_dist=not is_initialized())
