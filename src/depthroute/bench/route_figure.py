"""The figure of `bench route`: milliseconds of each arm by shape.

    python -m depthroute.bench.route_figure DIR     draws DIR/route.json again

One panel a shape on a common logarithmic axis, one line an arm: a mark at the median over a bar from the least to the
most of the samples, and the numbers. An arm without numbers has the reason in their place.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from depthroute.bench import peers, route
from depthroute.errors import in_one_line
from depthroute.files import write_text
from depthroute.report.drawing import styled, to_svg
from depthroute.report.style import INK, PALETTE

NAMES = {
    "engine": "two phases",
    "engine-compiled": "two phases, compiled",
    "read": "one kernel a read",
    "reference": "plain PyTorch",
    "compiled": "torch.compile",
}
MARKERS = "osD^vPX*"
WIDTH, LINE, HEAD, FOOT = 7.2, 0.23, 0.4, 0.75  # inches: of the figure, an arm, a panel's title, the axis
LABEL = 0.3  # of the axis, for the longest numbers beside the last mark


def write(result: dict[str, Any], out: Path) -> list[Path]:
    """Write route.svg and route.png of what route.json holds -> their paths; none where no row has numbers."""
    drawn = figure(result)
    if drawn is None:
        return []
    svg, png = out / "route.svg", out / "route.png"
    write_text(svg, to_svg(drawn))
    drawn.savefig(png, dpi=200, transparent=True)
    return [svg, png]


@styled
def figure(result: dict[str, Any]) -> Figure | None:
    """The figure of what route.json holds. None where no row has numbers."""
    rows = [row for row in result["rows"] if "skipped" not in row]
    if not any("graph_ms" in row for row in rows):
        return None
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    arms = list(dict.fromkeys([*NAMES, *peers.PEERS, *(row["arm"] for row in rows)]))
    panels = [[row for row in rows if row["shape"] == shape] for shape in shapes]
    height = FOOT + sum(HEAD + LINE * len(panel) for panel in panels)
    drawn = Figure(figsize=(WIDTH, height), layout="constrained")
    ratios = [len(panel) + 0.2 for panel in panels]  # the units of `_panel`
    all_axes = drawn.subplots(len(panels), sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    _milliseconds(all_axes[-1], [row["graph_ms"] for row in rows if "graph_ms" in row])
    for axes, panel in zip(all_axes, panels, strict=True):
        _panel(axes, sorted(panel, key=lambda row: arms.index(row["arm"])), arms)
    where = f"{result['environment']['device']}, {result['dtype']}, torch {result['environment']['torch']}"
    all_axes[-1].set_xlabel(
        "all depth reads of one microbatch, forward and backward (ms, logarithmic)\n"
        f"{where}, CUDA graphs; median (least to most)",
        fontsize=9,
    )
    return drawn


def _panel(axes: Axes, rows: list[dict[str, Any]], arms: list[str]) -> None:
    """The arms of one shape, the first one on top."""
    for line, row in enumerate(rows):
        place = arms.index(row["arm"])
        colour, marker = PALETTE[place % len(PALETTE)], MARKERS[place % len(MARKERS)]
        if "graph_ms" not in row:
            why = (route.reason(row) or "")[:70]
            axes.text(0.01, line, why, transform=axes.get_yaxis_transform(), va="center", fontsize=8.5, style="italic")
            continue
        graph = row["graph_ms"]
        median, least, most = graph["median"], graph["least"], graph["most"]
        axes.plot([axes.get_xlim()[0], median], [line, line], color=INK, linewidth=0.7, linestyle=(0, (1, 3)))
        axes.plot([least, most], [line, line], color=colour, linewidth=2.2, solid_capstyle="butt")
        axes.plot([median], [line], marker, color=colour, markersize=6.5)
        label = f"{median:#.4g} ({least:#.4g} to {most:#.4g})"
        axes.annotate(label, (most, line), (8, -0.5), textcoords="offset points", va="center", fontsize=8.5)
    axes.set_yticks(range(len(rows)), [NAMES.get(row["arm"], row["arm"]) for row in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_title(_title(rows[0]), loc="left", fontsize=9.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=True, axis="x")
    axes.set_axisbelow(True)
    axes.spines["left"].set_visible(False)


def _title(row: dict[str, Any]) -> str:
    blocks = f" in blocks of {row['block']}, gated" if row.get("block") else ""
    return (
        f"{row['shape']}:  {row['sites']} sites{blocks}, D {row['width']}, H {row['heads']}, {row['tokens']:,} tokens"
    )


def _milliseconds(axes: Axes, times: list[dict[str, float]]) -> None:
    """The common axis: from below the least to above the most, with room for the numbers beside it."""
    left, last = 0.8 * min(time["least"] for time in times), max(time["most"] for time in times)
    axes.set_xscale("log")
    axes.set_xlim(left, last * (last / left) ** (LABEL / (1 - LABEL)))
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def main(arguments: list[str] | None = None) -> None:
    """Draw a folder's route.json again."""
    parser = argparse.ArgumentParser(prog="python -m depthroute.bench.route_figure", description="Draw DIR/route.json.")
    parser.add_argument("folder", type=Path, metavar="DIR", help="what `depthroute bench route` wrote")
    folder = parser.parse_args(arguments).folder
    file = folder / "route.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"DIR is {folder}, but there is no {file}; `depthroute bench route --out DIR` writes it"
        )
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    paths = write(result, folder)
    print("\n".join(map(str, paths)) or "no figure: no row has numbers")


if __name__ == "__main__":
    in_one_line(main)
