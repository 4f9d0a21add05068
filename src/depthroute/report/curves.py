"""Curves over training tokens: the mean and range of several seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from depthroute.report.runs import Run

Points = dict[float, float]  # tokens -> loss


@dataclass(frozen=True)
class Band:
    """Mean, lowest and highest loss at each number of tokens."""

    tokens: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


def points(records: Iterable[Mapping[str, Any]], key: str = "loss") -> Points:
    return {record["tokens"]: record[key] for record in records if record.get(key) is not None}


def band(curves: Iterable[Points]) -> Band:
    """The band of one or more curves, at the numbers of tokens that all of them have."""
    curves = list(curves)
    shared = sorted(set.intersection(*(set(curve) for curve in curves)))
    rows = np.array([[curve[tokens] for tokens in shared] for curve in curves], dtype=np.float64)
    return Band(np.array(shared, dtype=np.float64), rows.mean(0), rows.min(0), rows.max(0))


def difference_band(pairs: Sequence[tuple[Run, Run]], key: str = "loss") -> Band | None:
    """The band of (arm minus baseline) over pairs of runs of one seed; None where no pair has a point in common."""
    differences = [_difference(*(points(run.evaluations, key) for run in pair)) for pair in pairs]
    differences = [difference for difference in differences if difference]
    found = band(differences) if differences else None
    return found if found is not None and found.tokens.size else None


def _difference(left: Points, right: Points) -> Points:
    return {tokens: left[tokens] - right[tokens] for tokens in left.keys() & right.keys()}
