"""The report page: one HTML file that needs nothing beside it, and the files that its numbers and figures come from."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from depthroute.report import figures, formats
from depthroute.report.comparison import Comparison, compare
from depthroute.report.folders import Folder, Group, read_folder
from depthroute.report.inline_svg import inline_svg
from depthroute.report.runs import Run
from depthroute.report.settings import settings
from depthroute.report.style import Stroke, strokes

_FILTERS = (
    formats.loss,
    formats.signed,
    formats.count,
    formats.amount,
    formats.memory,
    formats.duration,
    formats.unbroken,
)
_CAPTIONS = {
    "loss": "Held-out loss against training tokens.",
    "paired-difference": (
        "Held-out loss minus that of the baseline run of the same seed; below zero is better. "
        "Lines are means over the pairs, bands run from the lowest to the highest."
    ),
    "paired-difference-averaged": "The same for the averaged weights of both runs.",
    "throughput": "Training speed. Bars are medians over finished runs, dots are runs.",
}
# What is read of the parameters of the reads: the label of its axis, and the caption.
_READINGS = {
    "gates": ("gate", "Gates of {arm}: a line for each read, from the first (dark) to the last. At zero it is closed."),
    "query_norms": (
        "norm of the query",
        "Norms of the queries of {arm}: a line for each read, from the first (dark) to the last. "
        "A query of zero reads all its sources alike.",
    ),
}
_ONE_PAIR = (
    " Where there is one pair, its band is one standard error over the held-out sequences (neighbours can be of one "
    "document, which it leaves out of account); it says nothing of the spread between seeds."
)
_BANDS = " Lines are means over finished seeds, bands run from the lowest to the highest of them."


@dataclass(frozen=True)
class Plate:
    """One figure on the page: its drawing, its caption, and the path of its file from the page."""

    svg: Markup
    caption: str
    file: str


@dataclass(frozen=True)
class ReadMaps:
    """The reads of one arm and the run that they are from: curves of their parameters, and maps of their weights.

    `plates`: the maps, one for each route head.
    """

    arm: str
    run: Run
    seeds: int
    tokens: float | None
    curves: tuple[Plate, ...]
    plates: tuple[Plate, ...]


@dataclass(frozen=True)
class Section:
    """What the page shows of one group of runs."""

    anchor: str
    group: Group
    comparison: Comparison
    plates: tuple[Plate, ...]
    maps: tuple[ReadMaps, ...]


def build_report(folder: str | Path) -> Path:
    """Writes `report/index.html` into a run or study folder, finished or not, and returns its path.

    Beside it: `figures/*.svg`, every figure as a file, and `numbers.json`, every computed number in full precision.
    Raises FileNotFoundError if there is no such folder, ValueError if it is neither a run nor a study.
    """
    contents = read_folder(folder)
    out = contents.path / "report"
    (out / "figures").mkdir(parents=True, exist_ok=True)
    baseline = next((group.baseline for group in contents.groups if group.baseline is not None), None)
    colours = strokes(contents.arms, baseline)
    sections = [_section(contents, index, colours, out) for index in range(len(contents.groups))]
    page = (
        _templates(out)
        .get_template("page.html")
        .render(folder=contents, sections=sections, strokes=colours, settings=settings(contents))
    )
    numbers = {"name": contents.name, "comparisons": [asdict(section.comparison) for section in sections]}
    _write(out / "numbers.json", json.dumps(numbers, indent=2) + "\n")
    _write(out / "index.html", page)
    _remove_other_figures(out, sections)
    return out / "index.html"


def _section(contents: Folder, index: int, colours: Mapping[str, Stroke], out: Path) -> Section:
    group = contents.groups[index]
    comparison = compare(group)
    stem = f"{index + 1:02d}-{_slug(group.point)}-" if len(contents.groups) > 1 else ""
    return Section(
        anchor=f"group-{index + 1}",
        group=group,
        comparison=comparison,
        plates=tuple(_curves(group, comparison, colours, out, stem)),
        maps=tuple(_read_maps(group, out, stem)),
    )


def _curves(
    group: Group, comparison: Comparison, colours: Mapping[str, Stroke], out: Path, stem: str
) -> Iterator[Plate]:
    several = len(group.runs) > 1
    drawn = {
        "loss": figures.loss_curves(group, colours, comparison.unigram_entropy),
        "paired-difference": figures.paired_differences(group, colours),
        "paired-difference-averaged": figures.paired_differences(group, colours, averaged=True),
        "throughput": figures.throughput(group, colours) if several else None,
    }
    for name, figure in drawn.items():
        if figure is not None:
            caption = _CAPTIONS[name] + (_BANDS if several and name == "loss" else "")
            if name == "paired-difference" and any(arm.over_sequences for arm in comparison.arms):
                caption += _ONE_PAIR
            yield _plate(figures.to_svg(figure), f"{stem}{name}", caption, out)


def _read_maps(group: Group, out: Path, stem: str) -> Iterator[ReadMaps]:
    for index, arm in enumerate(group.arms):
        runs = [run for run in group.of(arm) if run.read_weights or any(map(_has_readings, run.readings))]
        if not runs:
            continue
        run = min(runs, key=lambda run: not run.finished)
        name = f"{index + 1}-{_slug(arm)}"
        tokens = run.read_weights[0].get("tokens") if run.read_weights else None
        curves = tuple(_parameter_curves(arm, run, out, stem, name))
        maps = tuple(_weight_maps(arm, run, out, stem, name))
        yield ReadMaps(arm, run, len(group.of(arm)), tokens, curves, maps)


def _has_readings(line: Mapping[str, Any]) -> bool:
    return any(line[key] for key in _READINGS)


def _parameter_curves(arm: str, run: Run, out: Path, stem: str, name: str) -> Iterator[Plate]:
    for key, (label, caption) in _READINGS.items():
        figure = figures.parameter_curves(run, key, label)
        if figure is not None:
            file = f"{stem}{key.replace('_', '-')}-{name}"
            yield _plate(figures.to_svg(figure), file, caption.format(arm=arm), out)


def _weight_maps(arm: str, run: Run, out: Path, stem: str, name: str) -> Iterator[Plate]:
    sites = run.read_weights
    highest = max((weight for site in sites for row in site["weights"] for weight in row), default=0.0)
    for head in range(min((len(site["weights"]) for site in sites), default=0)):
        svg = figures.to_svg(figures.read_weight_map(sites, head, highest))
        yield _plate(svg, f"{stem}read-weights-{name}-head-{head}", f"Read weights of {arm}, route head {head}", out)


def _plate(svg: str, name: str, caption: str, out: Path) -> Plate:
    _write(out / "figures" / f"{name}.svg", svg)
    return Plate(inline_svg(svg, name, caption), caption, f"figures/{name}.svg")


def _remove_other_figures(out: Path, sections: list[Section]) -> None:
    """Removes figures of an earlier report that this one does not have."""
    plates = [plate for section in sections for plate in section.plates]
    plates += [plate for section in sections for maps in section.maps for plate in (*maps.curves, *maps.plates)]
    for path in (out / "figures").glob("*.svg"):
        if f"figures/{path.name}" not in {plate.file for plate in plates}:
            path.unlink()


def _templates(out: Path) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("depthroute.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for write in _FILTERS:
        environment.filters[write.__name__] = write
    environment.filters["link"] = lambda path: quote(os.path.relpath(path, out).replace(os.sep, "/"))
    environment.filters["label"] = lambda path: Path(os.path.relpath(path, out.parent)).as_posix()
    return environment


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name)[:40].strip("-.")


def _write(path: Path, text: str) -> None:
    """Writes a file whole: whoever opens it meanwhile sees the old one or the new one."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
