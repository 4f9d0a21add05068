"""Reading what `depthroute probe` found, and saying in sentences what it means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from depthroute.probing.disagreement import ARRANGEMENTS
from depthroute.probing.folder import RECORD
from depthroute.probing.table import Row, probe_rows
from depthroute.report.formats import decimals
from depthroute.report.runs import read_json
from depthroute.report.shapes import NUMBER, OPTIONAL_NUMBER, TEXT, WHOLE, mismatch

_BESIDE_NULL: dict[str, Any] = {"null": NUMBER, "null_sd": OPTIONAL_NUMBER, "excess": NUMBER}
_KL: dict[str, Any] = {name: {"kl": NUMBER, **_BESIDE_NULL} for name in ARRANGEMENTS}
_LARGEST: dict[str, Any] = {"largest": {"largest": NUMBER, **_BESIDE_NULL}}
_CORRELATION: dict[str, Any] = {"r": OPTIONAL_NUMBER, "null": OPTIONAL_NUMBER}
_SITE: dict[str, Any] = {"site": WHOLE, "name": TEXT}
_READS: dict[str, Any] = {"sources": [TEXT], "weights": [[NUMBER]], "entropy": [NUMBER], "relative_entropy": NUMBER}
_SOURCE = {"source": TEXT, "sites": WHOLE, "mean_weight": NUMBER, "relative_weight": NUMBER}
_ALL: dict[str, Any] = {
    "model": TEXT,
    "residual": {"scheme": TEXT},
    "num_heads": WHOLE,
    "text": TEXT,
    "tokens": NUMBER,
    "collinearity": {"cosine": OPTIONAL_NUMBER, "sites": [{**_SITE, "cosine": NUMBER}]},
    "heads": {"relative_entropy": NUMBER, "sources": [_SOURCE], "sites": [{**_SITE, **_READS}]},
}
_SINGLE: dict[str, Any] = {
    "disagreement": {
        "slices": WHOLE,
        **_KL,
        "by_num_sources": [{"num_sources": WHOLE, **_KL}],
        "sites": [{**_SITE, **_KL}],
    },
    "heads": {"deviation": None},
}
_SEVERAL: dict[str, Any] = {
    "disagreement": None,
    "heads": {
        "deviation": {
            **_LARGEST,
            "split_half": _CORRELATION,
            "between_heads": {**_CORRELATION, "by_centring": NUMBER, "matrix": [[OPTIONAL_NUMBER]]},
        },
        "sites": [{"deviation": [[NUMBER]], "split_half": OPTIONAL_NUMBER, **_LARGEST}],
    },
}


@dataclass(frozen=True)
class Probe:
    """What a probe found: `found` is what `probing.probe_folder` returns, `label` names the model on the page."""

    label: str
    path: Path
    found: Mapping[str, Any]

    @property
    def num_heads(self) -> int:
        return self.found["num_heads"]

    @property
    def disagreement(self) -> Mapping[str, Any] | None:
        return self.found["disagreement"]

    @property
    def deviation(self) -> Mapping[str, Any] | None:
        return self.found["heads"]["deviation"]

    @property
    def sites(self) -> list[Mapping[str, Any]]:
        return self.found["heads"]["sites"]

    @property
    def cosines(self) -> dict[int, float]:
        """Site -> mean cosine of two of its sources; sites with one source are not in it."""
        return {site["site"]: site["cosine"] for site in self.found["collinearity"]["sites"]}

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple(probe_rows(self.found))

    @property
    def about(self) -> dict[str, Any]:
        """What was probed, and how."""
        return {key: value for key, value in self.found.items() if key not in ("collinearity", "disagreement", "heads")}

    @property
    def statement(self) -> tuple[str, ...]:
        return tuple(_statement(self))


def read_probe(folder: Path, problems: list[str], label: str = "") -> Probe | None:
    """The probe.json of a folder; None where there is none, or where it is damaged, which `problems` then says."""
    found = read_json(folder / RECORD, dict, problems)
    if found is None:
        return None
    if fault := _fault(found):
        problems.append(f"{RECORD}: damaged ({fault})")
        return None
    return Probe(label or found["model"], folder / RECORD, found)


def _fault(found: Mapping[str, Any]) -> str | None:
    fault = mismatch(found, _ALL) or mismatch(found, _SINGLE if found["num_heads"] == 1 else _SEVERAL)
    if fault is None and not found["heads"]["sites"]:
        fault = "heads.sites is empty"
    if fault is None and found["num_heads"] == 1:
        places = [[site["site"] for site in found[part]["sites"]] for part in ("heads", "disagreement")]
        fault = None if places[0] == places[1] else "heads and disagreement are of different sites"
    return fault or next(
        filter(None, (_site_fault(site, found["num_heads"]) for site in found["heads"]["sites"])), None
    )


def _site_fault(site: Mapping[str, Any], heads: int) -> str | None:
    for key in ("weights", "deviation") if heads > 1 else ("weights",):
        if len(site[key]) != heads or any(len(row) != len(site["sources"]) for row in site[key]):
            return f"the {key} of {site['name']} are not {heads} rows of {len(site['sources'])} numbers"
    if len(site["entropy"]) != heads:
        return f"the entropy of {site['name']} is not {heads} numbers"
    return None


def _statement(probe: Probe) -> Iterator[str]:
    if probe.disagreement is not None:
        yield from _state_slices(probe.disagreement)
    elif probe.deviation is not None:
        yield from _state_heads(probe.deviation, probe.num_heads)
    entropy, cosine = probe.found["heads"]["relative_entropy"], probe.found["collinearity"]["cosine"]
    beside = "" if cosine is None else f"; two sources of a site have a cosine of {decimals(cosine)} on average"
    yield f"The entropy of a read is {decimals(entropy)} of what an even read has{beside}."
    most = max(probe.found["heads"]["sources"], key=lambda source: source["relative_weight"])
    yield (
        f"For its number of readers {most['source']} is read most: {decimals(most['relative_weight'])} times an even "
        "share."
    )


def _state_slices(found: Mapping[str, Any]) -> Iterator[str]:
    slices, contiguous, interleaved = found["slices"], found["contiguous"], found["interleaved"]
    yield (
        f"One of {slices} slices of a query, reading alone, is {decimals(contiguous['kl'])} nats from what the whole "
        f"query reads; with random queries of the same norm it is {_null(contiguous)}."
    )
    yield (
        f"The excess over random queries is {decimals(contiguous['excess'], signed=True)} for contiguous slices, as "
        f"route heads would have them, and {decimals(interleaved['excess'], signed=True)} for interleaved ones."
    )


def _state_heads(found: Mapping[str, Any], heads: int) -> Iterator[str]:
    largest, split, between = found["largest"], found["split_half"], found["between_heads"]
    yield (
        f"A weight of one of the {heads} route heads is up to {decimals(largest['largest'])} away from the mean over "
        f"heads; with random queries of the same norm it is up to {_null(largest)}."
    )
    if split["r"] is not None:
        beside = "" if split["null"] is None else f" (random queries: {decimals(split['null'])})"
        yield f"On disjoint text these deviations are the same to a correlation of {decimals(split['r'])}{beside}."
    if between["r"] is not None:
        beside = f", where independent heads would have {decimals(between['by_centring'])}"
        yield f"Those of two heads correlate with {decimals(between['r'])}{beside}."


def _null(reading: Mapping[str, Any]) -> str:
    spread = "" if reading["null_sd"] is None else f" ± {decimals(reading['null_sd'])}"
    return f"{decimals(reading['null'])}{spread}"
