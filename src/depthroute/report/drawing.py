"""What all figures of a report share: their look, their axes, their names, and how they become SVG text.

Figures are matplotlib figures that belong to nobody (no pyplot, no global state). Backgrounds are transparent and all
text, axes and grids have the one colour `style.INK`, so that a figure is readable on light and dark pages. Text stays
text in the SVG.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from io import StringIO
from math import ceil
from typing import ParamSpec, TypeVar

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path
from matplotlib.ticker import EngFormatter, MaxNLocator

from depthroute.report.style import INK

WIDE = (4.8, 3.3)  # inches; 72 points, so 96 px on the page, each
NARROW = (3.3, 3.35)
LONGEST_NAME = 28
LEGEND_SIZE = 9.0  # points
LEGEND_LINE = 1.5 * LEGEND_SIZE  # points from one line of a legend to the next
LEGEND_ROWS = 2  # as many lines of a legend find room in a figure as it is

Arguments = ParamSpec("Arguments")
Drawn = TypeVar("Drawn", Figure, Figure | None)

_SETTINGS = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlecolor": INK,
    "grid.alpha": 0.22,
    "grid.color": INK,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.7,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",
    "svg.hashsalt": "depthroute",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "savefig.transparent": True,
}


def _settings() -> AbstractContextManager[None]:
    return matplotlib.rc_context(_SETTINGS)  # type: ignore[arg-type]


def styled(draw: Callable[Arguments, Drawn]) -> Callable[Arguments, Drawn]:
    """A function that draws, in the look of the report."""

    @wraps(draw)
    def with_settings(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Drawn:
        with _settings():
            return draw(*args, **kwargs)

    return with_settings


def to_svg(figure: Figure) -> str:
    """The figure as SVG text, the same for the same numbers: no dates, no random names."""
    out = StringIO()
    with _settings():
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return out.getvalue()


def wide(x: str, y: str, height: float = WIDE[1]) -> tuple[Figure, Axes]:
    """A figure for curves: as wide as a column of the page, with a grid, large numbers on the x axis as 12 M."""
    figure = Figure(figsize=(WIDE[0], height), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(visible=True)
    axes.set_axisbelow(True)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.tick_params(width=0.7, length=3)
    return figure, axes


def legend(figure: Figure, axes: Axes) -> None:
    """A legend above the axes, where it can hide nothing, in as many columns as there is room for.

    The figure grows by what a long one takes, so that the axes keep their height.
    """
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) < 2 and len(axes.lines) < 2:
        return
    columns = next(n for n in range(len(labels), 0, -1) if n == 1 or _legend_width(labels, n) < WIDE[0] * 72)
    more = ceil(len(labels) / columns) - LEGEND_ROWS
    figure.set_figheight(figure.get_figheight() + max(0, more) * LEGEND_LINE / 72)
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, fontsize=LEGEND_SIZE, handlelength=1.6)


def _legend_width(labels: Sequence[str], columns: int) -> float:
    """How wide a legend is, in points; matplotlib fills it column by column, each with as many as the next."""
    # A line of 1.6 em, 0.8 to its name, 2 between columns: matplotlib's own distances at this length of line.
    around = LEGEND_SIZE * (1.6 + 0.8 + 2)
    return sum(around + max(map(_text_width, column)) for column in np.array_split(labels, columns))


def _text_width(text: str) -> float:
    font = FontProperties(size=LEGEND_SIZE)
    return text_to_path.get_text_width_height_descent(text, font, ismath=False)[0]


def name_ticks(axes: Axes, rows: Sequence[str], columns: Sequence[str]) -> None:
    """Names the rows and columns of a map, as many as there is room for."""
    for axis, names, rotation in ((axes.yaxis, rows, 0), (axes.xaxis, columns, 90)):
        ticks = thin_ticks(len(names))
        axis.set_ticks(ticks, [short(names[i]) for i in ticks], rotation=rotation, fontsize=7.5)
    axes.tick_params(width=0.6, length=2.5)


def thin_ticks(n: int, most: int = 13) -> list[int]:
    """At most `most` of n positions, evenly apart, the first and the last among them."""
    step = max(1, ceil((n - 1) / (most - 1)))
    ticks = list(range(0, n, step))
    if ticks[-1] != n - 1:
        if n - 1 - ticks[-1] < step / 2 + 0.5:
            ticks.pop()
        ticks.append(n - 1)
    return ticks


def short(name: str) -> str:
    """A name that fits. One that starts with "_" gets a thin space, or matplotlib would leave it out of legends."""
    name = name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"
    return f"\N{THIN SPACE}{name}" if name.startswith("_") else name
