"""The parts of a page about runs: for each group of them its comparison, its curves, and what its reads do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from depthroute.report import figures
from depthroute.report.comparison import Comparison, compare
from depthroute.report.folders import Folder, Group
from depthroute.report.maps import read_weight_map
from depthroute.report.plates import Plate, Plates, slug
from depthroute.report.runs import Run
from depthroute.report.style import Stroke

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

    index: int  # from 1
    group: Group
    comparison: Comparison
    plates: tuple[Plate, ...]
    maps: tuple[ReadMaps, ...]

    @property
    def anchor(self) -> str:
        return f"group-{self.index}"


def run_sections(folder: Folder, colours: Mapping[str, Stroke], plates: Plates) -> list[Section]:
    """One section for each group of runs; its figures are written."""
    several = len(folder.groups) > 1
    return [
        _section(group, index, f"{index:02d}-{slug(group.point)}-" if several else "", colours, plates)
        for index, group in enumerate(folder.groups, 1)
    ]


def _section(group: Group, index: int, stem: str, colours: Mapping[str, Stroke], plates: Plates) -> Section:
    comparison = compare(group)
    return Section(
        index=index,
        group=group,
        comparison=comparison,
        plates=tuple(_curves(group, comparison, colours, plates, stem)),
        maps=tuple(_read_maps(group, plates, stem)),
    )


def _curves(
    group: Group, comparison: Comparison, colours: Mapping[str, Stroke], plates: Plates, stem: str
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
            yield plates.add(figure, f"{stem}{name}", caption)


def _read_maps(group: Group, plates: Plates, stem: str) -> Iterator[ReadMaps]:
    for index, arm in enumerate(group.arms, 1):
        runs = [run for run in group.of(arm) if run.read_weights or any(map(_has_readings, run.readings))]
        if not runs:
            continue
        run = min(runs, key=lambda run: not run.finished)
        name = f"{index}-{slug(arm)}"
        tokens = run.read_weights[0].get("tokens") if run.read_weights else None
        curves = tuple(_parameter_curves(arm, run, plates, stem, name))
        weights = tuple(_weight_maps(arm, run, plates, stem, name))
        yield ReadMaps(arm, run, len(group.of(arm)), tokens, curves, weights)


def _has_readings(line: Mapping[str, Any]) -> bool:
    return any(line[key] for key in _READINGS)


def _parameter_curves(arm: str, run: Run, plates: Plates, stem: str, name: str) -> Iterator[Plate]:
    for key, (label, caption) in _READINGS.items():
        figure = figures.parameter_curves(run, key, label)
        if figure is not None:
            yield plates.add(figure, f"{stem}{key.replace('_', '-')}-{name}", caption.format(arm=arm))


def _weight_maps(arm: str, run: Run, plates: Plates, stem: str, name: str) -> Iterator[Plate]:
    sites = run.read_weights
    highest = max((weight for site in sites for row in site["weights"] for weight in row), default=0.0)
    for head in range(min((len(site["weights"]) for site in sites), default=0)):
        figure = read_weight_map(sites, head, highest)
        yield plates.add(figure, f"{stem}read-weights-{name}-head-{head}", f"Read weights of {arm}, route head {head}")
