"""The figures about runs: losses, differences, speed, and what is read of the parameters over training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, LinearSegmentedColormap
from matplotlib.figure import Figure

from depthroute.report import sequences
from depthroute.report.curves import Band, band, difference_band, points
from depthroute.report.drawing import legend, short, styled, thin_ticks, wide
from depthroute.report.folders import Group
from depthroute.report.runs import Run
from depthroute.report.style import INK, Stroke

SETTLED = 0.05  # losses of the first 5 % of the tokens do not stretch the axis


@styled
def loss_curves(group: Group, strokes: Mapping[str, Stroke], unigram_entropy: float | None = None) -> Figure | None:
    """Held-out loss against training tokens: one line an arm, the mean over seeds in a band from lowest to highest.

    Only finished runs make the mean; the others are thin dotted lines of their own, with a cross where they end.
    None where nothing was evaluated yet.
    """
    if not any(run.evaluations for run in group.runs):
        return None
    figure, axes = wide("training tokens", "held-out loss (nats / token)")
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
    if len(group.runs) == 1 and group.runs[0].training:
        shown.append(_draw_training(axes, group.runs[0]))
    _fit_losses(axes, shown)
    if unigram_entropy is not None and axes.get_ylim()[1] > unigram_entropy:
        axes.axhline(unigram_entropy, color=INK, linewidth=0.8, linestyle=(0, (2, 2)), label="unigram entropy")
    legend(figure, axes)
    return figure


@styled
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
    figure, axes = wide("training tokens", f"loss minus {short(str(group.baseline))}")
    axes.axhline(0, color=strokes[str(group.baseline)].colour, linewidth=1.4)
    for arm, found in bands.items():
        _draw(axes, found, strokes[arm], arm)
    _fit_losses(axes, bands.values(), include=0.0)
    legend(figure, axes)
    return figure


def _difference_band(pairs: Sequence[tuple[Run, Run]], averaged: bool) -> Band | None:
    if len(pairs) == 1:
        found = sequences.difference_band(*pairs[0], sequences.AVERAGED if averaged else sequences.PLAIN)
        if found is not None:
            return found
    return difference_band(pairs, "ema_loss" if averaged else "loss")


@styled
def parameter_curves(run: Run, key: str, label: str) -> Figure | None:
    """What one parameter of each read says over training: a line for each, coloured from the first to the last read.

    `key`: "gates" or "query_norms" of the run's readings. None where the run has none.
    """
    lines = [line for line in run.readings if line[key]]
    names = sorted({name for line in lines for name in line[key]}, key=_natural)
    if not names:
        return None
    figure, axes = wide("training tokens", label)
    # Neither end of the map: the dark one is lost on a dark page, the yellow one on a light page.
    colours = LinearSegmentedColormap.from_list("reads", matplotlib.colormaps["viridis"](np.linspace(0.28, 0.88, 64)))
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


@styled
def throughput(group: Group, strokes: Mapping[str, Stroke]) -> Figure | None:
    """Training tokens a second of each arm: a bar for the median over its finished runs, a dot for each run."""
    speeds = {
        arm: [speed for run in group.of(arm) if run.finished and (speed := run.number("tokens_per_second")) is not None]
        for arm in group.arms
    }
    speeds = {arm: values for arm, values in speeds.items() if values}
    if not speeds:
        return None
    figure, axes = wide("training tokens / s", "", height=0.75 + 0.32 * len(speeds))
    axes.grid(visible=False, axis="y")
    for row, (arm, values) in enumerate(speeds.items()):
        axes.barh(row, float(np.median(values)), height=0.55, color=strokes[arm].colour, alpha=0.85, linewidth=0)
        axes.plot(values, [row] * len(values), ".", color=INK, markersize=4)
    axes.set_yticks(range(len(speeds)), [short(arm) for arm in speeds])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    return figure


def _draw(axes: Axes, curve: Band, stroke: Stroke, arm: str) -> None:
    axes.fill_between(curve.tokens, curve.low, curve.high, color=stroke.colour, alpha=0.18, linewidth=0)
    marker = "o" if curve.tokens.size == 1 else ""
    axes.plot(curve.tokens, curve.mean, color=stroke.colour, linestyle=stroke.dashes, marker=marker, label=short(arm))


def _draw_thin(axes: Axes, curve: Band, stroke: Stroke, arm: str | None) -> None:
    label = None if arm is None else f"{short(arm)} (unfinished)"
    axes.plot(curve.tokens, curve.mean, color=stroke.colour, linestyle=(0, (1, 1.4)), linewidth=1.0, label=label)
    axes.plot(curve.tokens[-1:], curve.mean[-1:], "x", color=stroke.colour, markersize=5)


def _draw_training(axes: Axes, run: Run) -> Band:
    training = band([points(run.training)])
    axes.plot(training.tokens, training.mean, color=INK, linewidth=0.6, alpha=0.6, label="training loss")
    return training


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


def _natural(name: str) -> list[int | str]:
    """A key that sorts the tenth read after the second."""
    return [int(part) if part.isdecimal() else part for part in name.split(".")]
