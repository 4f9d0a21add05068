"""Figures as files, and as parts of a page."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup
from matplotlib.figure import Figure

from depthroute.files import write_text
from depthroute.report.drawing import to_svg
from depthroute.report.inline_svg import inline_svg


@dataclass(frozen=True)
class Plate:
    """One figure on the page: its drawing, its caption, and the path of its file from the page."""

    svg: Markup
    caption: str
    file: str


class Plates:
    """The folder of figures of one report."""

    def __init__(self, out: Path) -> None:
        self._folder = out / "figures"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._written: set[str] = set()

    def add(self, figure: Figure, name: str, caption: str) -> Plate:
        """Writes a figure as figures/`name`.svg; `name` has letters, digits and "-", "_", "." alone."""
        svg = to_svg(figure)
        file = f"{name}.svg"
        write_text(self._folder / file, svg)
        self._written.add(file)
        return Plate(inline_svg(svg, name, caption), caption, f"figures/{file}")

    def remove_others(self) -> None:
        """Removes figures of an earlier report that this one does not have."""
        for path in self._folder.glob("*.svg"):
            if path.name not in self._written:
                path.unlink()


def slug(name: str) -> str:
    """A name as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name)[:40].strip("-.")
