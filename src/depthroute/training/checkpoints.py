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
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
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


def write_text(path: Path, text: str) -> None:
    """Write a file so that it is there as a whole or, after a kill, as it was."""
    draft = path.with_name(f".{path.name}.partial")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def write_json(path: Path, values: Any) -> None:
    """`write_text` of JSON."""
    write_text(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")
