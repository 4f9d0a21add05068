"""Files that are there as a whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Write a file so that it is there as a whole or, after a kill, as it was; its folder is made too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.partial")
    with draft.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def write_json(path: Path, values: Any) -> None:
    """`write_text` of JSON."""
    write_text(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")
