"""The part of a page about one probe: its readings, its figures, and a table of its sites."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from depthroute.report import probe_figures
from depthroute.report.maps import correlation_matrix, deviation_map, read_weight_map
from depthroute.report.plates import Plate, Plates, slug
from depthroute.report.probes import Probe

_DISAGREEMENT = (
    "How far slices of the query, reading alone, are from what the whole query reads (mean over tokens and slices). "
    "Dashed: random queries of the same norm, in a band of one standard deviation over the draws. Slices of equal "
    "strength have their logits times the number of slices, so that slices that agree are at 0."
)
_LARGEST = (
    "Largest difference between the mean weight of one head and the mean over heads, at each site. Random queries have "
    "the same norm; their band is one standard deviation over the draws."
)
_EVENNESS = "At 1 a site reads all its sources alike{dots}; the cosine says how alike its sources are."
_SHARES = (
    "Weight on each source times the number of sources, a mean over the sites that can read it: 1 is an even share."
)
_BETWEEN = "Correlation of the deviations of every two route heads, over all sites and sources."


@dataclass(frozen=True)
class SiteRow:
    """The readings of one site; `reading` is the KL of slices for one head, the largest deviation for several."""

    name: str
    sources: int
    entropy: float
    cosine: float | None
    reading: float
    null: float
    excess: float
    split_half: float | None


@dataclass(frozen=True)
class ProbePart:
    """What the page shows of one probe; `maps` has one plate for each route head, and `deviations` too if several."""

    anchor: str
    probe: Probe
    plates: tuple[Plate, ...]
    maps: tuple[Plate, ...]
    deviations: tuple[Plate, ...]
    sites: tuple[SiteRow, ...]


def probe_part(probe: Probe, index: int, plates: Plates, *, with_maps: bool = True) -> ProbePart:
    """The part about a probe, the `index`-th of the page from 1; its figures are written.

    `with_maps`: the maps of its read weights too, where the page does not have those of the run.
    """
    stem = f"probe-{index}-{slug(probe.label)}"
    return ProbePart(
        anchor=f"probe-{index}",
        probe=probe,
        plates=tuple(_plates(probe, stem, plates)),
        maps=tuple(_weight_maps(probe, stem, plates)) if with_maps else (),
        deviations=tuple(_deviations(probe, stem, plates)),
        sites=tuple(_site_rows(probe)),
    )


def _plates(probe: Probe, stem: str, plates: Plates) -> Iterator[Plate]:
    if probe.disagreement is not None:
        yield plates.add(probe_figures.disagreement(probe), f"{stem}-disagreement", _DISAGREEMENT)
    if probe.deviation is not None:
        yield plates.add(probe_figures.largest_deviation(probe), f"{stem}-largest-deviation", _LARGEST)
    dots = ", dots are its heads" if probe.num_heads > 1 else ""
    yield plates.add(probe_figures.evenness(probe), f"{stem}-evenness", _EVENNESS.format(dots=dots))
    yield plates.add(probe_figures.source_shares(probe), f"{stem}-sources", _SHARES)
    if probe.deviation is not None:
        matrix = probe.deviation["between_heads"]["matrix"]
        yield plates.add(correlation_matrix(matrix), f"{stem}-between-heads", _BETWEEN)


def _weight_maps(probe: Probe, stem: str, plates: Plates) -> Iterator[Plate]:
    highest = max(weight for site in probe.sites for row in site["weights"] for weight in row)
    for head in range(probe.num_heads):
        caption = f"Read weights of {probe.label}, route head {head}"
        yield plates.add(read_weight_map(probe.sites, head, highest), f"{stem}-read-weights-head-{head}", caption)


def _deviations(probe: Probe, stem: str, plates: Plates) -> Iterator[Plate]:
    if probe.deviation is not None:
        largest = probe.deviation["largest"]["largest"]
        for head in range(probe.num_heads):
            caption = f"Deviations of {probe.label}, route head {head}"
            yield plates.add(deviation_map(probe.sites, head, largest), f"{stem}-deviation-head-{head}", caption)


def _site_rows(probe: Probe) -> Iterator[SiteRow]:
    slices: dict[int, Any] = {site["site"]: site["contiguous"] for site in (probe.disagreement or {}).get("sites", ())}
    for site in probe.sites:
        reading = slices[site["site"]] if slices else site["largest"]
        yield SiteRow(
            name=site["name"],
            sources=len(site["sources"]),
            entropy=site["relative_entropy"],
            cosine=probe.cosines.get(site["site"]),
            reading=reading["kl" if slices else "largest"],
            null=reading["null"],
            excess=reading["excess"],
            split_half=site.get("split_half"),
        )
