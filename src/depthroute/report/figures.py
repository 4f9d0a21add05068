"""The figures of a report, as matplotlib figures that belong to nobody (no pyplot, no global state).

Backgrounds are transparent and all text, axes and grids have the one colour `style.INK`, so that a figure is readable
on light and dark pages. Text stays text in the SVG.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from io import StringIO
from math import ceil, isfinite
from typing import Any, ParamSpec, TypeVar

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from depthroute.report import sequences
from depthroute.report.curves import Band, band, difference_band, points
from depthroute.report.folders import Group
from depthroute.report.runs import Run
from depthroute.report.style import INK, Stroke

WIDE = (4.8, 3.3)  # inches; 72 points, so 96 px on the page, each
NARROW = (3.3, 3.35)
SETTLED = 0.05  # losses of the first 5 % of the tokens do not stretch the axis
LONGEST_NAME = 28

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


def _styled(draw: Callable[Arguments, Drawn]) -> Callable[Arguments, Drawn]:
    @wraps(draw)
    def styled(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Drawn:
        with _settings():
            return draw(*args, **kwargs)

    return styled


def to_svg(figure: Figure) -> str:
    """The figure as SVG text, the same for the same numbers: no dates, no random names."""
    out = StringIO()
    with _settings():
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return out.getvalue()


@_styled
def loss_curves(group: Group, strokes: Mapping[str, Stroke], unigram_entropy: float | None = None) -> Figure | None:
    """Held-out loss against training tokens: one line an arm, the mean over seeds in a band from lowest to highest.

    Only finished runs make the mean; the others are thin dotted lines of their own, with a cross where they end.
    None where nothing was evaluated yet.
    """
    if not any(run.evaluations for run in group.runs):
        return None
    figure, axes = _wide("training tokens", "held-out loss (nats / token)")
    shown: list[Band] = []
    for arm in group.arms:
        runs = [run for run in group.of(arm) if run.evaluations]
        finished = [run for run in runs if run.finished]
        if finished:
            shown.append(band(points(run.evaluations) for run in finished))
            _draw(axes, shown[-1], strokes[arm], arm)
        for run in runs:
            if not run.finished:
                shown.append(band([points(run.evaluations)]))
                _draw_thin(axes, shown[-1], strokes[arm], arm if not finished and run is runs[0] else None)
    if len(group.runs) == 1:
        _draw_training(axes, group.runs[0])
    _fit_losses(axes, shown)
    if unigram_entropy is not None and axes.get_ylim()[1] > unigram_entropy:
        axes.axhline(unigram_entropy, color=INK, linewidth=0.8, linestyle=(0, (2, 2)), label="unigram entropy")
    _legend(figure, axes)
    return figure


@_styled
def paired_differences(group: Group, strokes: Mapping[str, Stroke], averaged: bool = False) -> Figure | None:
    """Held-out loss minus that of the baseline run of the same seed, mean and range over the seeds that both finished.

    A single pair has a band of one standard error over the held-out sequences where both runs know their losses.
    `averaged`: of the averaged weights. None where there is no pair to show.
    """
    bands = {}
    for arm in group.arms:
        if group.baseline is not None and arm != group.baseline:
            found = _difference_band(group.pairs(arm), averaged)
            if found is not None:
                bands[arm] = found
    if not bands:
        return None
    figure, axes = _wide("training tokens", f"loss minus {_short(str(group.baseline))}")
    axes.axhline(0, color=strokes[str(group.baseline)].colour, linewidth=1.4)
    for arm, found in bands.items():
        _draw(axes, found, strokes[arm], arm)
    _fit_losses(axes, bands.values(), include=0.0)
    _legend(figure, axes)
    return figure


def _difference_band(pairs: Sequence[tuple[Run, Run]], averaged: bool) -> Band | None:
    if len(pairs) == 1:
        found = sequences.difference_band(*pairs[0], sequences.AVERAGED if averaged else sequences.PLAIN)
        if found is not None:
            return found
    return difference_band(pairs, "ema_loss" if averaged else "loss")


@_styled
def parameter_curves(run: Run, key: str, label: str) -> Figure | None:
    """What one parameter of each read says over training: a line for each, coloured from the first to the last read.

    `key`: "gates" or "query_norms" of the run's readings. None where the run has none.
    """
    lines = [line for line in run.readings if line[key]]
    names = sorted({name for line in lines for name in line[key]}, key=_natural)
    if not names:
        return None
    figure, axes = _wide("training tokens", label)
    colours = matplotlib.colormaps["viridis"]
    for i, name in enumerate(names):
        here = points(({"tokens": line["tokens"], "value": line[key].get(name)} for line in lines), "value")
        colour = colours(i / max(1, len(names) - 1))
        axes.plot(list(here), list(here.values()), color=colour, linewidth=0.9, marker="" if len(here) > 1 else "o")
    axes.set_xlim(left=0)
    shades = ScalarMappable(BoundaryNorm(np.arange(len(names) + 1) - 0.5, colours.N), colours)
    bar = figure.colorbar(shades, ax=axes, fraction=0.045, pad=0.03, label="read", ticks=thin_ticks(len(names), 7))
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.ax.tick_params(labelsize=7.5, width=0.6, length=2.5)
    return figure


@_styled
def throughput(group: Group, strokes: Mapping[str, Stroke]) -> Figure | None:
    """Training tokens a second of each arm: a bar for the median over its finished runs, a dot for each run."""
    speeds = {
        arm: [speed for run in group.of(arm) if run.finished and (speed := run.number("tokens_per_second")) is not None]
        for arm in group.arms
    }
    speeds = {arm: values for arm, values in speeds.items() if values}
    if not speeds:
        return None
    figure, axes = _wide("training tokens / s", "", height=0.75 + 0.32 * len(speeds))
    axes.grid(visible=False, axis="y")
    for row, (arm, values) in enumerate(speeds.items()):
        axes.barh(row, float(np.median(values)), height=0.55, color=strokes[arm].colour, alpha=0.85, linewidth=0)
        axes.plot(values, [row] * len(values), ".", color=INK, markersize=4)
    axes.set_yticks(range(len(speeds)), [_short(arm) for arm in speeds])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    return figure


@_styled
def read_weight_map(sites: Sequence[Mapping[str, Any]], head: int, highest: float) -> Figure:
    """Mean weight with which each site (row) reads each source (column) in one route head.

    `sites` as `probing.mean_read_weights` gives them; `highest` ends the colour scale, so that maps can share it.
    """
    columns = merge_names([site["sources"] for site in sites])
    place = {name: i for i, name in enumerate(columns)}
    image = np.full((len(sites), len(columns)), np.nan)
    for row, site in enumerate(sites):
        for name, weight in zip(site["sources"], site["weights"][head], strict=True):
            image[row, place[name]] = weight
    figure = Figure(figsize=NARROW, layout="constrained")
    axes = figure.add_subplot()
    # Small weights are many and matter: a square-root scale keeps 0.02 apart from 0.
    norm = PowerNorm(0.5, vmin=0.0, vmax=highest)
    shown = axes.imshow(image, cmap="viridis", norm=norm, aspect="auto", interpolation="none")
    _name_ticks(axes, [str(site.get("name", f"site {site['site']}")) for site in sites], columns)
    axes.set_title(f"route head {head}", loc="left")
    axes.set_ylabel("site that reads")
    axes.set_xlabel("source")
    bar = figure.colorbar(shown, ax=axes, fraction=0.045, pad=0.03)
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.ax.tick_params(labelsize=7.5, width=0.6, length=2.5)
    bar.ax.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    return figure


def merge_names(lists: Iterable[Sequence[str]]) -> list[str]:
    """All names, each once, in an order that keeps the order inside every list: a new name follows its predecessor."""
    merged: list[str] = []
    for names in lists:
        after = 0
        for name in names:
            if name in merged:
                after = merged.index(name) + 1
            else:
                merged.insert(after, name)
                after += 1
    return merged


def _wide(x: str, y: str, height: float = WIDE[1]) -> tuple[Figure, Axes]:
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


def _draw(axes: Axes, curve: Band, stroke: Stroke, arm: str) -> None:
    axes.fill_between(curve.tokens, curve.low, curve.high, color=stroke.colour, alpha=0.18, linewidth=0)
    marker = "o" if curve.tokens.size == 1 else ""
    axes.plot(curve.tokens, curve.mean, color=stroke.colour, linestyle=stroke.dashes, marker=marker, label=_short(arm))


def _draw_thin(axes: Axes, curve: Band, stroke: Stroke, arm: str | None) -> None:
    label = None if arm is None else f"{_short(arm)} (unfinished)"
    axes.plot(curve.tokens, curve.mean, color=stroke.colour, linestyle=(0, (1, 1.4)), linewidth=1.0, label=label)
    axes.plot(curve.tokens[-1:], curve.mean[-1:], "x", color=stroke.colour, markersize=5)


def _draw_training(axes: Axes, run: Run) -> None:
    if run.training:
        training = points(run.training)
        axes.plot(list(training), list(training.values()), color=INK, linewidth=0.6, alpha=0.6, label="training loss")


def _fit_losses(axes: Axes, curves: Iterable[Band], include: float | None = None) -> None:
    """Fits the axis of losses to what comes after the first `SETTLED` of the tokens."""
    curves = [curve for curve in curves if curve.tokens.size]
    end = max((curve.tokens[-1] for curve in curves), default=0.0)
    values = [] if include is None else [include]
    for curve in curves:
        late = curve.tokens >= SETTLED * end
        values += [float(v) for side in (curve.low, curve.high) for v in side[late] if isfinite(v)]
    if values and max(values) > min(values):
        margin = 0.05 * (max(values) - min(values))
        axes.set_ylim(min(values) - margin, max(values) + margin)
    if end > 0:
        axes.set_xlim(0, end)


def _legend(figure: Figure, axes: Axes) -> None:
    """A legend above the axes, where it can hide nothing, in as many columns as there is room for."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) < 2 and len(axes.lines) < 2:
        return
    columns = next(n for n in range(len(labels), 0, -1) if n == 1 or _legend_width(labels, n) < WIDE[0] * 72)
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, fontsize=9, handlelength=1.6)


def _legend_width(labels: Sequence[str], columns: int) -> float:
    """About how wide a legend is, in points; matplotlib fills it column by column."""
    rows = ceil(len(labels) / columns)
    return sum(38 + 5.1 * max(map(len, labels[start : start + rows])) for start in range(0, len(labels), rows))


def _natural(name: str) -> list[int | str]:
    """A key that sorts the tenth read after the second."""
    return [int(part) if part.isdecimal() else part for part in name.split(".")]


def _name_ticks(axes: Axes, rows: Sequence[str], columns: Sequence[str]) -> None:
    for axis, names, rotation in ((axes.yaxis, rows, 0), (axes.xaxis, columns, 90)):
        ticks = thin_ticks(len(names))
        axis.set_ticks(ticks, [_short(names[i]) for i in ticks], rotation=rotation, fontsize=7.5)
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


def _short(name: str) -> str:
    """A name that fits. One that starts with "_" gets a thin space, or matplotlib would leave it out of legends."""
    name = name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"
    return f"\N{THIN SPACE}{name}" if name.startswith("_") else name
