"""A results folder: one folder for each model, one file for each finished task, and one for its items.

    <out>/<model>/settings.json        what the results below hold for
    <out>/<model>/<task>.json          the scores of a finished task
    <out>/<model>/<task>.items.jsonl   its items: what the model said, and the score of each
    <out>/evaluation.json, .md         all models and tasks, with the significance of differences

Every file appears whole, and that of the scores last: a task with scores is finished.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from depthroute import files

SETTINGS, RECORD, TABLE = "settings.json", "evaluation.json", "evaluation.md"

_NOT_FINITE = ("nan", "inf", "-inf")  # JSON has no such numbers


class ModelResults:
    """The results of one model under one set of settings.

    Raises ValueError where the folder holds results of other settings, naming what differs.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder, self.settings = folder, settings
        file = folder / SETTINGS
        if file.is_file():
            found = _read_json(file)
            for key in sorted({*found, *settings}):
                if found.get(key) != settings.get(key):
                    # Earlier versions did not save all settings; what they do not say can not be taken for the same.
                    held = f"for {key} {found[key]!r}" if key in found else f"of an earlier version, without {key}"
                    raise ValueError(
                        f"out: {folder} holds results {held}, this is {settings.get(key)!r}; "
                        "give another folder, or remove that one"
                    )
        else:
            write_json(file, settings)

    def is_finished(self, task: str) -> bool:
        return (self.folder / f"{task}.json").is_file()

    def scores(self, task: str) -> dict[str, Any]:
        return _read_json(self.folder / f"{task}.json")

    def items(self, task: str) -> Iterator[dict[str, Any]]:
        file = self.folder / f"{task}.items.jsonl"
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                yield _parsed(line, f"{file}, line {number}")

    def save(self, task: str, scores: dict[str, Any], items: Iterable[dict[str, Any]]) -> None:
        """The scores last, so that what they say is there once they are."""
        lines = (json.dumps(_plain(item), ensure_ascii=False) + "\n" for item in items)
        files.write_text(self.folder / f"{task}.items.jsonl", "".join(lines))
        write_json(self.folder / f"{task}.json", scores)


def _read_json(file: Path) -> Any:
    return _parsed(file.read_text(encoding="utf-8"), str(file))


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is damaged ({error}); remove the task's files, and it is run again") from error


def write_json(path: Path, content: Any) -> None:
    """A file that is there whole, or as it was."""
    files.write_json(path, _plain(content))


def as_number(value: Any) -> float | None:
    """A number of a saved file, with those that are not finite, which stand there by name; None for anything else."""
    if isinstance(value, str):
        return float(value) if value in _NOT_FINITE else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _plain(value: Any) -> Any:
    """In types that JSON has: numpy's numbers become Python's, what is not finite its name, tuples lists."""
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if hasattr(value, "item") and not isinstance(value, str):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
