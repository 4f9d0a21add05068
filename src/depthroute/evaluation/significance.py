"""Two models on the same items: exact McNemar tests, paired bootstrap intervals, Holm's correction, and their table.

Differences are candidate minus baseline throughout.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import numpy as np
from scipy import stats

from depthroute.errors import nearest

Key = TypeVar("Key", bound=Hashable)
Scores = Mapping[str, Mapping[Hashable, float]]  # task -> item -> score

_CHUNK = 2**20  # resampled items held at a time


@dataclass(frozen=True)
class Interval:
    """A paired bootstrap interval of a mean difference.

    `p`: the two-sided p-value that belongs to it, twice the smaller share of resamples on either side of zero; at
    least 2 / (resamples + 1).
    """

    mean: float
    low: float
    high: float
    confidence: float
    resamples: int
    p: float


@dataclass(frozen=True)
class TaskComparison:
    """Both models on one task.

    `test` is "mcnemar" where every item is right or wrong (scores 0 and 1), else "bootstrap". `only_baseline` and
    `only_candidate` count the items that one of the two alone has right (McNemar), `low` and `high` are the ends of
    the 95 % interval of the difference. `p_holm` is corrected for all tasks of the table.
    """

    task: str
    items: int
    baseline: float
    candidate: float
    difference: float
    test: str
    only_baseline: int | None
    only_candidate: int | None
    low: float
    high: float
    p: float
    p_holm: float


@dataclass(frozen=True)
class Comparison:
    """Two models on all tasks that they were compared on. `left_out`: a sentence on each task that they were not."""

    baseline: str
    candidate: str
    tasks: tuple[TaskComparison, ...]
    left_out: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON, in full precision."""
        return {**asdict(self), "tasks": [asdict(task) for task in self.tasks]}

    def to_markdown(self) -> str:
        """The table, one row a task."""
        heads = ["task", "items", self.baseline, self.candidate, "difference", "95 % interval"]
        heads += [f"only {self.baseline}", f"only {self.candidate}", "p", "p (Holm)"]
        rows = [" | ".join(map(_cell, heads)), " | ".join(["---"] + ["---:"] * (len(heads) - 1))]
        rows += [" | ".join(map(_cell, _row(task))) for task in self.tasks]
        return "".join(f"| {row} |\n" for row in rows)


def mcnemar(only_baseline: int, only_candidate: int) -> float:
    """The exact two-sided McNemar p-value from the two discordant counts; 1 where there is no discordant item.

    Under the null every item that one model alone has right is a fair coin (McNemar 1947, binomial form).
    Raises ValueError for a negative count, TypeError for one that is not a whole number.
    """
    for name, count in ("only_baseline", only_baseline), ("only_candidate", only_candidate):
        if isinstance(count, bool) or not isinstance(count, int | np.integer):
            raise TypeError(f"{name} is {count!r}; wanted a whole number of items")
        if count < 0:
            raise ValueError(f"{name} is {count}; wanted at least 0")
    discordant = int(only_baseline) + int(only_candidate)
    return float(stats.binomtest(int(only_candidate), discordant).pvalue) if discordant else 1.0


def paired_bootstrap(
    baseline: Sequence[float] | np.ndarray,
    candidate: Sequence[float] | np.ndarray,
    *,
    weights: Sequence[float] | np.ndarray | None = None,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Interval:
    """The percentile interval of the mean difference candidate - baseline, items resampled in pairs.

    Item i of both sequences is the same item. `weights` (words of a document, say) makes the mean a weighted one, and
    each resample weighs by what it drew. The same seed gives the same interval.
    Raises ValueError for sequences of unequal length, no items, values that are not finite, weights that are not
    positive, and settings out of range.
    """
    first, second = np.asarray(baseline, dtype=np.float64), np.asarray(candidate, dtype=np.float64)
    share = np.ones(len(first)) if weights is None else np.asarray(weights, dtype=np.float64)
    _check_samples(first, second, share)
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; wanted a number between 0 and 1")
    if resamples < 1:
        raise ValueError(f"resamples is {resamples}; wanted at least 1")
    means = _resampled_means((second - first) * share, share, resamples, np.random.default_rng(seed))
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    smaller_side = min(int((means <= 0).sum()), int((means >= 0).sum()))
    p = min(1.0, 2 * (smaller_side + 1) / (resamples + 1))
    mean = float(((second - first) * share).sum() / share.sum())
    return Interval(mean, float(low), float(high), confidence, resamples, p)


def holm(p_values: Mapping[Key, float]) -> dict[Key, float]:
    """The p-values corrected for their number by Holm's step-down method, under the same keys (Holm 1979).

    The i-th smallest of m (from 0) becomes the largest of (m - j) p_j over j <= i, at most 1.
    Raises ValueError for a p-value outside [0, 1].
    """
    for key, p in p_values.items():
        if not 0 <= p <= 1:
            raise ValueError(f"p_values: {key!r} has {p}; wanted a number from 0 to 1")
    corrected: dict[Key, float] = {}
    highest = 0.0
    for rank, key in enumerate(sorted(p_values, key=lambda key: p_values[key])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[key]))
        corrected[key] = highest
    return {key: corrected[key] for key in p_values}


def compare_tasks(
    baseline: Scores,
    candidate: Scores,
    *,
    names: tuple[str, str] = ("baseline", "candidate"),
    weights: Scores | None = None,
    resamples: int = 10_000,
    seed: int = 0,
) -> Comparison:
    """Two models on the same items of the same tasks: a test for each task, and Holm's correction over all of them.

    `baseline` and `candidate` map task -> item -> score. A task whose scores are all 0 or 1 (or False and True) and
    unweighted is tested by McNemar, any other by the paired bootstrap; the interval is the bootstrap's for both.
    `weights` maps task -> item -> weight for the tasks whose mean is a weighted one.
    Raises ValueError where the two have other tasks, or other items of a task.
    """
    weights = weights or {}
    _check_same("tasks", baseline, candidate, names)
    for task in weights:
        if task not in baseline:
            raise ValueError(f"weights: unknown task {task!r}{nearest(task, baseline)}")
    found = []
    for task, scores in baseline.items():
        _check_same(f"items of task {task!r}", scores, candidate[task], names)
        if task in weights:
            _check_same(f"weights of task {task!r}", scores, weights[task], (names[0], "weights"))
        found.append(_compare_task(task, scores, candidate[task], weights.get(task), resamples, seed))
    corrected = holm({task.task: task.p for task in found})
    return Comparison(*names, tuple(replace(task, p_holm=corrected[task.task]) for task in found))


def _compare_task(
    task: str,
    baseline: Mapping[Hashable, float],
    candidate: Mapping[Hashable, float],
    weights: Mapping[Hashable, float] | None,
    resamples: int,
    seed: int,
) -> TaskComparison:
    first, second = (
        np.array([scores[item] for item in baseline], dtype=np.float64) for scores in (baseline, candidate)
    )
    share = np.ones(len(first)) if weights is None else np.array([weights[item] for item in baseline])
    try:
        interval = paired_bootstrap(first, second, weights=share, resamples=resamples, seed=seed)
    except ValueError as error:
        raise ValueError(f"task {task!r}: {error}") from None
    only_first = only_second = None
    p = interval.p
    right_or_wrong = weights is None and bool(np.isin(np.concatenate([first, second]), (0.0, 1.0)).all())
    if right_or_wrong:
        only_first, only_second = int((first > second).sum()), int((second > first).sum())
        p = mcnemar(only_first, only_second)
    return TaskComparison(
        task=task,
        items=len(first),
        baseline=float((first * share).sum() / share.sum()),
        candidate=float((second * share).sum() / share.sum()),
        difference=interval.mean,
        test="mcnemar" if right_or_wrong else "bootstrap",
        only_baseline=only_first,
        only_candidate=only_second,
        low=interval.low,
        high=interval.high,
        p=p,
        p_holm=p,
    )


def _resampled_means(
    weighted: np.ndarray, share: np.ndarray, resamples: int, generator: np.random.Generator
) -> np.ndarray:
    """(resamples,) means of `weighted` over items drawn with replacement, a few resamples at a time."""
    items, means = len(share), []
    step = max(1, _CHUNK // items)
    for start in range(0, resamples, step):
        drawn = generator.integers(items, size=(min(step, resamples - start), items))
        means.append(weighted[drawn].sum(1) / share[drawn].sum(1))
    return np.concatenate(means)


def _check_samples(first: np.ndarray, second: np.ndarray, share: np.ndarray) -> None:
    if not len(first) == len(second) == len(share):
        raise ValueError(
            f"baseline has {len(first)} items, candidate {len(second)} and weights {len(share)}; wanted the same items"
        )
    if not len(first):
        raise ValueError("baseline and candidate have no items; wanted at least one")
    for name, values in ("baseline", first), ("candidate", second), ("weights", share):
        if not np.isfinite(values).all():
            item = int(np.flatnonzero(~np.isfinite(values))[0])
            raise ValueError(f"{name}: item {item} is {values[item]}; wanted finite numbers")
    if not (share > 0).all():
        raise ValueError(f"weights: the smallest is {share.min()}; wanted positive numbers")


def _check_same(what: str, first: Mapping[Any, Any], second: Mapping[Any, Any], names: tuple[str, str]) -> None:
    for has, lacks, have, lack in ((first, second, *names), (second, first, *names[::-1])):
        missing = [key for key in has if key not in lacks]
        if missing:
            raise ValueError(
                f"{what}: {lack} lacks {len(missing)} of the {len(has)} that {have} has, {missing[0]!r} among them"
            )
    if not first:
        raise ValueError(f"{what}: there are none; wanted at least one")


def _row(task: TaskComparison) -> list[str]:
    def discordant(count: int | None) -> str:
        return "" if count is None else str(count)

    interval = f"{task.low:+.4f} to {task.high:+.4f}"
    scores = [f"{task.baseline:.4f}", f"{task.candidate:.4f}", f"{task.difference:+.4f}", interval]
    counts = [discordant(task.only_baseline), discordant(task.only_candidate)]
    return [task.task, str(task.items), *scores, *counts, _p(task.p), _p(task.p_holm)]


def _p(p: float) -> str:
    return "< 0.0001" if p < 1e-4 else f"{p:.4f}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
