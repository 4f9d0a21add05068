"""The recipes and studies that come with the package, and the files that names stand for."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Literal

from depthroute.training import strict_yaml

Kind = Literal["recipe", "study"]
_COMMANDS: dict[Kind, str] = {"recipe": "depthroute train", "study": "depthroute study"}


def find_recipe(name: str | Path, beside: Path | None = None, kind: Kind = "recipe") -> Path:
    """The file of a recipe or study: relative to the folder `beside` (or the working directory), else a shipped one.

    ".yaml" may be left out. Raises FileNotFoundError that lists the shipped ones of this kind; what the file holds is
    for its reader to check.
    """
    for folder in (beside or Path(), recipe_folder()):
        for path in (folder / name, folder / f"{name}.yaml"):
            if path.is_file():
                return path
    raise FileNotFoundError(f"no {kind} {str(name)!r}{_hint(str(name), kind)} (shipped: {', '.join(_shipped(kind))})")


def recipe_folder() -> Path:
    """The folder of the shipped recipes: in the installed package, or at the root of a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parents[1] / "recipes"


def _shipped(kind: Kind) -> list[str]:
    # Both lie in one folder; a study is what has arms.
    folder = recipe_folder()
    return sorted(
        path.relative_to(folder).with_suffix("").as_posix()
        for path in folder.rglob("*.yaml")
        if ("arms" in strict_yaml.read_mapping(path)) == (kind == "study")
    )


def _hint(name: str, kind: Kind) -> str:
    """What an unknown name was meant to be: the very name, of its own kind or of the other, comes before a near one."""
    other: Kind = "study" if kind == "recipe" else "recipe"
    for cutoff in (1.0, 0.6):
        if close := _nearest_shipped(name, kind, cutoff):
            return f"; did you mean {close!r}?"
        if close := _nearest_shipped(name, other, cutoff):
            return f"; did you mean the {other} {close!r}, which is for `{_COMMANDS[other]}`?"
    return ""


def _nearest_shipped(name: str, kind: Kind, cutoff: float) -> str | None:
    known = _shipped(kind)
    # The name without its folder ("main" for "studies/main") is too short to be near the whole one.
    name, last = name.removesuffix(".yaml"), {full.rpartition("/")[2]: full for full in known}
    close = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    close = close or difflib.get_close_matches(name.rpartition("/")[2], last, n=1, cutoff=cutoff)
    return last.get(close[0], close[0]) if close else None
