"""The tables of a study from its rows: losses with error bars, paired differences, best rates, equal-cost readings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from depthroute.studies import statistics
from depthroute.studies.study import Study, label, points

RATE_AXIS = "optimizer.learning_rate"
# Schemes whose reads and writes have no fused kernels: on a GPU their speed is that of compiled PyTorch.
UNFUSED = ("denseformer", "hyper_connections", "mhc")

Row = Mapping[str, Any]


def compare(
    study: Study, table: Sequence[Row], evaluations: Mapping[str, Sequence[Mapping[str, float]]]
) -> dict[str, Any]:
    """Everything that results.json says beside its rows, for the runs that are finished so far.

    `table`: the rows of the runs; `evaluations`: run name ("mhar/seed-0") -> its evaluation records.
    "arms": for each arm and point the loss (tail mean) over seeds and the paired difference to the baseline there.
    "best_learning_rates": where the learning rate is an axis, each arm at its best one, and its difference to the
    baseline at the baseline's own best one. "readings": losses at equal steps, tokens and seconds for each point, means
    over `seeds`, those that all arms there have (None where there are none: over each arm's own); the speeds are those
    that the runs logged: an arm's own only where it had its device to itself.
    """
    finished = [row for row in table if row["status"] == "finished"]
    return {
        "arms": [_arm(study, finished, arm, point) for point in points(study) for arm in study.arms],
        "best_learning_rates": _best_learning_rates(study, finished),
        "readings": _readings(study, finished, evaluations),
    }


def losses(table: Sequence[Row], arm: str, point: Mapping[str, Any]) -> dict[int, float]:
    """Seed -> tail loss of the finished runs of one arm at one point of the grid."""
    return {row["seed"]: row["tail_loss"] for row in _at(table, arm, point)}


def _at(table: Sequence[Row], arm: str, point: Mapping[str, Any]) -> list[Row]:
    return [row for row in table if row["arm"] == arm and all(row[axis] == value for axis, value in point.items())]


def _arm(study: Study, finished: Sequence[Row], arm: str, point: Mapping[str, Any]) -> dict[str, Any]:
    mine = _at(finished, arm, point)
    own, baseline = losses(finished, arm, point), losses(finished, study.baseline, point)
    return {
        "label": label(arm, point),
        "arm": arm,
        "point": dict(point),
        "baseline": label(study.baseline, point),
        "loss": asdict(statistics.summarise(own.values())) if own else None,
        "difference": None if arm == study.baseline else _difference(own, baseline),
        "parameters": _common(mine, "parameters"),
        "residual_parameters": _common(mine, "residual_parameters"),
        "unigram_entropy": _common(mine, "unigram_entropy"),
        "tokens_per_second": _median(mine, "tokens_per_second"),
        "peak_memory_bytes": _median(mine, "peak_memory_bytes"),
    }


def _best_learning_rates(study: Study, finished: Sequence[Row]) -> list[dict[str, Any]]:
    if RATE_AXIS not in study.grid:
        return []
    rates = [rate for rate in study.grid[RATE_AXIS] if isinstance(rate, float)]
    others = {tuple((a, v) for a, v in point.items() if a != RATE_AXIS): None for point in points(study)}
    found = []
    for rest in map(dict, others):
        by_arm = {arm: {rate: losses(finished, arm, {**rest, RATE_AXIS: rate}) for rate in rates} for arm in study.arms}
        complete = {arm: by_rate for arm, by_rate in by_arm.items() if _has_complete_rate(by_rate)}
        best = statistics.best_learning_rates(complete)
        reference = best[study.baseline].losses if study.baseline in best else {}
        for arm, chosen in best.items():
            difference = None if arm == study.baseline else _difference(chosen.losses, reference)
            found.append({"arm": arm, "point": rest, **asdict(chosen), "difference": difference})
    return found


def _difference(arm: Mapping[int, float], baseline: Mapping[int, float]) -> dict[str, Any] | None:
    return asdict(statistics.paired_difference(arm, baseline)) if arm.keys() & baseline.keys() else None


def _has_complete_rate(by_rate: Mapping[Any, Mapping[int, float]]) -> bool:
    seeds = {seed for by_seed in by_rate.values() for seed in by_seed}
    return any(
        seeds and by_seed.keys() == seeds and all(map(math.isfinite, by_seed.values())) for by_seed in by_rate.values()
    )


def _readings(
    study: Study, finished: Sequence[Row], evaluations: Mapping[str, Sequence[Mapping[str, float]]]
) -> list[dict[str, Any]]:
    found = []
    for point in points(study):
        by_seed: dict[str, dict[int, statistics.Curve]] = {}
        unfused: list[str] = []
        speeds: dict[str, float] = {}
        for arm in study.arms:
            mine = _at(finished, arm, point)
            of_seeds = {row["seed"]: evaluations[f"{row['label']}/seed-{row['seed']}"] for row in mine}
            if mine and all(of_seeds.values()):
                by_seed[arm] = {seed: statistics.curve(records) for seed, records in of_seeds.items()}
                speeds[arm] = _median(mine, "tokens_per_second") or 0.0
                if mine[0]["scheme"] in UNFUSED:
                    unfused.append(arm)
        if len(by_seed) < 2:
            continue
        # Seeds differ by more than arms do.
        shared = sorted(set.intersection(*(set(found) for found in by_seed.values()))) or None
        curves = {arm: statistics.mean_curve([own[seed] for seed in shared or own]) for arm, own in by_seed.items()}
        readings = [statistics.equal_steps(curves), statistics.equal_tokens(curves)]
        if all(speeds.values()):
            readings.append(statistics.equal_wall_clock(curves, speeds, unfused=unfused))
        found += [{"point": dict(point), "seeds": shared, **asdict(reading)} for reading in readings]
    return found


def _median(table: Sequence[Row], key: str) -> float | None:
    known = [row[key] for row in table if row[key] is not None]
    return median(known) if known else None


def _common(table: Sequence[Row], key: str) -> Any:
    """The value on which all rows agree; None where they do not."""
    values = {row[key] for row in table}
    return values.pop() if len(values) == 1 else None
