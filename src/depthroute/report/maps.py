"""Figures of what is read: maps over sites and sources, one for each route head, and heads beside each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator

from depthroute.report.drawing import NARROW, name_ticks, styled
from depthroute.report.style import DIVERGING

Sites = Sequence[Mapping[str, Any]]


@styled
def read_weight_map(sites: Sites, head: int, highest: float) -> Figure:
    """Mean weight with which each site (row) reads each source (column) in one route head.

    `sites` as `probing.mean_read_weights` gives them; `highest` ends the colour scale, so that maps can share it.
    """
    # Small weights are many and matter: a square-root scale keeps 0.02 apart from 0.
    return _map(sites, "weights", head, "viridis", PowerNorm(0.5, vmin=0.0, vmax=highest))


@styled
def deviation_map(sites: Sites, head: int, largest: float) -> Figure:
    """Mean weight of one route head minus the mean over heads, by site (row) and source (column).

    `sites` as `probing.head_maps` gives them; the colour scale goes from -`largest` to `largest`.
    """
    return _map(sites, "deviation", head, DIVERGING, Normalize(-largest, largest))


@styled
def correlation_matrix(matrix: Sequence[Sequence[float | None]]) -> Figure:
    """Correlation of the deviation maps of every two route heads; blank where one does not vary."""
    figure = Figure(figsize=NARROW, layout="constrained")
    axes = figure.add_subplot()
    image = np.array([[np.nan if value is None else value for value in row] for row in matrix], dtype=np.float64)
    shown = axes.imshow(image, cmap=DIVERGING, norm=Normalize(-1, 1), interpolation="none")
    heads = [str(head) for head in range(len(matrix))]
    name_ticks(axes, heads, heads)
    axes.tick_params(axis="x", rotation=0)
    axes.set_xlabel("route head")
    axes.set_ylabel("route head")
    _colour_bar(figure, shown)
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


def _map(sites: Sites, key: str, head: int, colours: Any, norm: Normalize) -> Figure:
    columns = merge_names([site["sources"] for site in sites])
    place = {name: i for i, name in enumerate(columns)}
    image = np.full((len(sites), len(columns)), np.nan)
    for row, site in enumerate(sites):
        for name, value in zip(site["sources"], site[key][head], strict=True):
            image[row, place[name]] = value
    figure = Figure(figsize=NARROW, layout="constrained")
    axes = figure.add_subplot()
    shown = axes.imshow(image, cmap=colours, norm=norm, aspect="auto", interpolation="none")
    name_ticks(axes, [str(site.get("name", f"site {site['site']}")) for site in sites], columns)
    axes.set_title(f"route head {head}", loc="left")
    axes.set_ylabel("site that reads")
    axes.set_xlabel("source")
    _colour_bar(figure, shown)
    return figure


def _colour_bar(figure: Figure, shown: AxesImage) -> None:
    bar = figure.colorbar(shown, ax=shown.axes, fraction=0.045, pad=0.03)
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.ax.tick_params(labelsize=7.5, width=0.6, length=2.5)
    bar.ax.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
