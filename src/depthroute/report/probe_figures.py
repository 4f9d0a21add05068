"""The figures about a probe: what slices or heads of queries read beside random ones, by site and by source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from depthroute.probing.disagreement import ARRANGEMENTS
from depthroute.report.drawing import legend, short, styled, thin_ticks, wide
from depthroute.report.probes import Probe
from depthroute.report.style import BASELINE, INK, PALETTE


@styled
def disagreement(probe: Probe) -> Figure:
    """KL of slices from their whole against the number of sources; solid for trained, dashed for random queries."""
    assert probe.disagreement is not None
    rows = probe.disagreement["by_num_sources"]
    figure, axes = wide("sources that a site can read", "KL (nats)")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    places = np.array([row["num_sources"] for row in rows], dtype=np.float64)
    for name, colour in zip(ARRANGEMENTS, PALETTE, strict=False):
        readings = [row[name] for row in rows]
        _beside_null(axes, places, readings, "kl", colour, name.replace("_", " "), null=None)
    for line, width in zip(axes.lines[::2], (2.6, 1.4, 1.4), strict=False):
        line.set_linewidth(width)  # where two coincide, both are seen
    axes.plot([], [], color=INK, linewidth=1.2, linestyle=(0, (3, 2)), label="random queries")
    axes.set_ylim(bottom=0)
    legend(figure, axes)
    return figure


@styled
def largest_deviation(probe: Probe) -> Figure:
    """The largest deviation of a head from the mean over heads at each site, beside that of random queries."""
    figure, axes = _by_site(probe, "largest deviation of a head")
    places = np.arange(len(probe.sites), dtype=np.float64)
    readings = [site["largest"] for site in probe.sites]
    _beside_null(axes, places, readings, "largest", PALETTE[0], "trained queries", null="random queries")
    axes.set_ylim(bottom=0)
    legend(figure, axes)
    return figure


@styled
def evenness(probe: Probe) -> Figure:
    """Entropy of the read of each site, as a share of an even one (a dot for each head), and cosine of its sources."""
    figure, axes = _by_site(probe, "share of an even read; cosine")
    places = np.arange(len(probe.sites))
    heads = np.array([site["entropy"] for site in probe.sites])
    counts = np.array([len(site["sources"]) for site in probe.sites])
    several = counts > 1
    if probe.num_heads > 1:
        shares = heads[several] / np.log(counts[several])[:, None]
        axes.plot(places[several], shares, ".", color=PALETTE[0], alpha=0.4, markersize=4)
    axes.plot(places, [site["relative_entropy"] for site in probe.sites], color=PALETTE[0], label="entropy of the read")
    cosines = [probe.cosines.get(site["site"], np.nan) for site in probe.sites]
    axes.plot(places, cosines, color=PALETTE[1], label="cosine of two sources")
    axes.set_ylim(top=1.03, bottom=min(0.0, float(np.nanmin([*cosines, 0.0])) - 0.05))
    legend(figure, axes)
    return figure


@styled
def source_shares(probe: Probe) -> Figure:
    """How much each source is read by those that can, as a multiple of an even share."""
    sources = probe.found["heads"]["sources"]
    figure, axes = wide("", "weight, in even shares")
    axes.grid(visible=False, axis="x")
    shares = [source["relative_weight"] for source in sources]
    axes.bar(range(len(shares)), shares, width=0.8, color=PALETTE[0], alpha=0.85, linewidth=0)
    axes.axhline(1, color=BASELINE, linewidth=1.2)
    _name_places(axes, [source["source"] for source in sources])
    return figure


def _beside_null(
    axes: Axes,
    places: np.ndarray,
    readings: Sequence[Mapping[str, Any]],
    key: str,
    colour: str,
    label: str,
    null: str | None,
) -> None:
    """Trained queries as a solid line with dots, random ones dashed in a band of one standard deviation."""
    random = np.array([reading["null"] for reading in readings])
    spread = np.array([reading["null_sd"] or 0.0 for reading in readings])
    axes.plot(places, [reading[key] for reading in readings], "o-", color=colour, markersize=3.2, label=label)
    axes.fill_between(places, random - spread, random + spread, color=colour, alpha=0.18, linewidth=0)
    axes.plot(places, random, color=colour, linewidth=1.2, linestyle=(0, (3, 2)), label=null)


def _by_site(probe: Probe, label: str) -> tuple[Figure, Axes]:
    figure, axes = wide("", label)
    _name_places(axes, [site["name"] for site in probe.sites])
    return figure, axes


def _name_places(axes: Axes, names: Sequence[str]) -> None:
    ticks = thin_ticks(len(names))
    axes.set_xticks(ticks, [short(names[i]) for i in ticks], rotation=90, fontsize=8.5)
    axes.set_xlim(-0.6, len(names) - 0.4)
