"""Files that are there as a whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError


def write_text(path: Path, text: str) -> None:
    """Write a file so that it is there as a whole or, after a kill, as it was; its folder is made too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.partial")
    with draft.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


@contextlib.contextmanager
def alone_in(folder: Path, refusal: str) -> Iterator[None]:
    """Have a folder to oneself; RuntimeError with the text `refusal` where another process has it.

    It is free again as soon as that process is gone, however it ended. Where the system or its file system has no such
    locks, nobody is refused.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(refusal) from None
        except OSError:
            pass
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def said_plainly(folder: Path) -> Iterator[None]:
    """OSError that names the folder and its free space where torch or safetensors could not write a file in it.

    Torch's own error tells of places in its source and in the file, and neither is an OSError.
    """
    try:
        yield
    except (RuntimeError, SafetensorError) as error:
        if not any(sign in str(error) for sign in ("inline_container", "I/O error")):
            raise
        free = shutil.disk_usage(folder).free / 1e6
        raise OSError(f"a file in {folder} could not be written whole; its disk has {free:,.1f} MB free") from error


def new_folder(path: str | Path, argument: str) -> Path:
    """`path` as a folder that is there or can be made; ValueError that names `argument` where a file is in the way."""
    folder = Path(path).expanduser()
    for place in (folder, *folder.parents):
        if place.exists() and not place.is_dir():
            raise ValueError(f"{argument} is {path}, but {place} is a file; wanted a folder")
    return folder


def new_file(path: str | Path, argument: str) -> Path:
    """`path` as a file that can be written; ValueError that names `argument` where it is a folder or in a file."""
    file = Path(path).expanduser()
    if file.is_dir():
        raise ValueError(f"{argument} is {path}, which is a folder; wanted a file")
    new_folder(file.parent, argument)
    return file


def write_json(path: Path, values: Any) -> None:
    """`write_text` of JSON."""
    write_text(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")
