"""The compute-equivalent gains of a study whose grid is a range of scales."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from depthroute.studies.comparisons import losses
from depthroute.studies.compute_gain import PowerLaw, compute_gain, fit_power_law
from depthroute.studies.flops import TokenFlops, recipe_flops, why_not_counted
from depthroute.studies.study import Run, Study, label, points


def compute_gains(study: Study, runs: Sequence[Run], table: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The fit through the baseline's points of the grid, and the gain of every other arm at every point.

    "fit": the fit in words, None where there is none; "warning": what is weak about it, or why there is none, and which
    arms have no gain because their FLOPs are not counted or the fit never reaches their loss; "gains": label, routing
    share and gain. A loss is the mean over the seeds that an arm and the baseline share.
    """
    finished = [row for row in table if row["status"] == "finished"]
    by_label = {run.label: run for run in runs}
    counted = {name: flops for name, run in by_label.items() if (flops := recipe_flops(run.recipe)) is not None}
    left_out = "; ".join(dict.fromkeys(_left_out(run) for name, run in by_label.items() if name not in counted))
    if any(label(study.baseline, point) not in counted for point in points(study)):
        return {"fit": None, "warning": left_out, "gains": []}
    scales = []
    for point in points(study):
        name = label(study.baseline, point)
        if found := losses(finished, study.baseline, point):
            scales.append((counted[name].baseline * by_label[name].tokens, fmean(found.values())))
    fit, warning = _fit(scales)
    gains, without = _gains(study, finished, counted, fit) if fit else ([], [])
    warning = "; ".join(filter(None, (warning, left_out, *without))) or None
    return {"fit": str(fit) if fit else None, "warning": warning, "gains": gains}


def _left_out(run: Run) -> str:
    return f"{run.arm} has no gain: {why_not_counted(run.recipe)}"


def _fit(scales: Sequence[tuple[float, float]]) -> tuple[PowerLaw | None, str | None]:
    if not scales:
        return None, "no baseline is finished"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            fit = fit_power_law(*zip(*scales, strict=True))
        except ValueError as error:
            return None, str(error)
    return fit, "; ".join(str(warning.message) for warning in caught) or None


def _gains(
    study: Study, finished: Sequence[Mapping[str, Any]], counted: Mapping[str, TokenFlops], fit: PowerLaw
) -> tuple[list[dict[str, Any]], list[str]]:
    """The gains, and for each label without one the reason."""
    found, without = [], []
    for point in points(study):
        baseline = losses(finished, study.baseline, point)
        for arm in study.arms:
            own = losses(finished, arm, point)
            shared = own.keys() & baseline.keys()
            if arm == study.baseline or not shared or label(arm, point) not in counted:
                continue
            share = counted[label(arm, point)].routing_share
            try:
                gain = compute_gain(
                    fit,
                    baseline_loss=fmean(baseline[seed] for seed in shared),
                    method_loss=fmean(own[seed] for seed in shared),
                    routing_share=share,
                )
            except ValueError as error:  # a loss that is not finite, or below all that the fit reaches
                without.append(f"{label(arm, point)} has no gain: {error}")
                continue
            found.append({"label": label(arm, point), "routing_share": share, "gain": gain})
    return found, without
