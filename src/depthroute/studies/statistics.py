"""Statistics of paired runs: tail means, paired differences, best learning rates, and readings of curves at equal cost.

Plain functions on plain numbers: nothing here knows of files, models or studies. What cannot be computed (a standard
deviation of one value, a p-value of one pair) is None, never a made-up zero.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class Summary:
    """Mean, sample standard deviation (n - 1) and standard error of n values; the last two are None for one value."""

    mean: float
    standard_deviation: float | None
    standard_error: float | None
    n: int


@dataclass(frozen=True)
class PairedDifference(Summary):
    """A `Summary` of arm minus baseline over the seeds that both have; `p` is that of a two-sided paired t-test."""

    p: float | None
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class BestRate:
    """The learning rate at which an arm has its lowest mean loss.

    `at_edge`: it is the lowest or highest rate tried (of two or more), so the best one may lie outside.
    `incomplete`: rates left out because some of their seeds have no finite loss.
    """

    learning_rate: float
    mean: float
    losses: dict[int, float]
    tried: tuple[float, ...]
    at_edge: bool
    incomplete: tuple[float, ...]


@dataclass(frozen=True)
class Curve:
    """Held-out losses of one run in the order they were taken: steps, tokens and losses of equal length."""

    steps: np.ndarray
    tokens: np.ndarray
    losses: np.ndarray


@dataclass(frozen=True)
class Reading:
    """Losses of several arms read at one value of `axis` ("step", "tokens" or "seconds").

    `unfused`: arms whose speed is of a form without fused kernels, so that their place in time is no property of them.
    `late`: arms without a loss, since their first evaluation comes later.
    """

    axis: str
    at: float
    losses: dict[str, float]
    unfused: tuple[str, ...] = ()
    late: tuple[str, ...] = ()


def tail_mean(losses: Sequence[float], k: int) -> float:
    """Mean of the last `k` losses, or of all where there are fewer.

    Raises ValueError for no losses or k < 1.
    """
    if k < 1:
        raise ValueError(f"k: got {k}, wants at least 1")
    if not len(losses):
        raise ValueError("losses: got none, wants at least one evaluation")
    return float(np.mean(np.asarray(losses, dtype=np.float64)[-k:]))


def summarise(values: Iterable[float]) -> Summary:
    """Mean, standard deviation and standard error of `values`; ValueError where there are none."""
    x = np.asarray(list(values), dtype=np.float64)
    if x.size == 0:
        raise ValueError("values: got none, wants at least one")
    if x.size == 1:
        return Summary(float(x[0]), None, None, 1)
    deviation = float(x.std(ddof=1))
    return Summary(float(x.mean()), deviation, deviation / math.sqrt(x.size), int(x.size))


def paired_difference(arm: Mapping[int, float], baseline: Mapping[int, float]) -> PairedDifference:
    """Arm minus baseline, paired by seed; both map seed to loss, and seeds of one side alone are left out.

    p is None for one pair, and where all differences are equal (no spread, so no t).
    Raises ValueError where the two share no seed.
    """
    seeds = tuple(sorted(arm.keys() & baseline.keys()))
    if not seeds:
        raise ValueError(f"arm and baseline share no seed: got {sorted(arm)} and {sorted(baseline)}")
    left, right = [arm[s] for s in seeds], [baseline[s] for s in seeds]
    summary = summarise(a - b for a, b in zip(left, right, strict=True))
    p = float(stats.ttest_rel(left, right).pvalue) if summary.standard_deviation else None
    return PairedDifference(
        summary.mean, summary.standard_deviation, summary.standard_error, summary.n, p=p, seeds=seeds
    )


def best_learning_rates(losses: Mapping[str, Mapping[float, Mapping[int, float]]]) -> dict[str, BestRate]:
    """For each arm the learning rate with the lowest mean loss; `losses` is arm -> rate -> seed -> loss.

    Rates are compared on equal terms: only those with a finite loss for every seed that the arm has anywhere.
    Raises ValueError for an arm with no such rate.
    """
    return {arm: _best_rate(arm, by_rate) for arm, by_rate in losses.items()}


def _best_rate(arm: str, by_rate: Mapping[float, Mapping[int, float]]) -> BestRate:
    seeds = {seed for by_seed in by_rate.values() for seed in by_seed}
    complete = {
        rate: dict(by_seed)
        for rate, by_seed in by_rate.items()
        if by_seed.keys() == seeds and all(math.isfinite(loss) for loss in by_seed.values())
    }
    if not seeds or not complete:
        raise ValueError(f"arm {arm!r}: no learning rate has a finite loss for every seed")
    means = {rate: float(np.mean(list(by_seed.values()))) for rate, by_seed in complete.items()}
    best = min(means, key=lambda rate: (means[rate], rate))
    tried = tuple(sorted(by_rate))
    return BestRate(
        learning_rate=best,
        mean=means[best],
        losses=complete[best],
        tried=tried,
        at_edge=len(tried) > 1 and best in (tried[0], tried[-1]),
        incomplete=tuple(rate for rate in tried if rate not in complete),
    )


def curve(evaluations: Iterable[Mapping[str, float]]) -> Curve:
    """The curve of evaluation records with keys "step", "tokens" and "loss", as a run's metrics.jsonl holds them.

    Raises ValueError for no records, and for steps that do not rise.
    """
    records = list(evaluations)
    if not records:
        raise ValueError("evaluations: got none, wants at least one")
    steps, tokens, losses = (
        np.array([record[key] for record in records], dtype=np.float64) for key in ("step", "tokens", "loss")
    )
    if np.any(np.diff(steps) <= 0):
        raise ValueError(f"evaluations: steps must rise, got {steps.astype(int).tolist()}")
    return Curve(steps, tokens, losses)


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Mean of the losses of several seeds at the steps that all of them have; ValueError where they share none."""
    if not curves:
        raise ValueError("curves: got none, wants at least one")
    shared = sorted(set.intersection(*(set(c.steps.tolist()) for c in curves)))
    if not shared:
        raise ValueError("curves: they share no step")
    rows = [np.isin(c.steps, shared) for c in curves]
    losses = np.mean([c.losses[row] for c, row in zip(curves, rows, strict=True)], axis=0)
    return Curve(curves[0].steps[rows[0]], curves[0].tokens[rows[0]], losses)


def equal_steps(curves: Mapping[str, Curve], step: float | None = None) -> Reading:
    """Loss of each arm after `step` steps (by default the last step that every arm reached), linear between points.

    Raises ValueError where a curve does not reach or starts later.
    """
    return _read("step", {arm: (c.steps, c.losses) for arm, c in curves.items()}, step)


def equal_tokens(curves: Mapping[str, Curve], tokens: float | None = None) -> Reading:
    """Loss of each arm after `tokens` training tokens (by default the most that all saw); else as `equal_steps`."""
    return _read("tokens", {arm: (c.tokens, c.losses) for arm, c in curves.items()}, tokens)


def equal_wall_clock(
    curves: Mapping[str, Curve],
    tokens_per_second: Mapping[str, float],
    seconds: float | None = None,
    *,
    unfused: Collection[str] = (),
) -> Reading:
    """Loss of each arm after `seconds` of training at its own speed (by default the most that every arm trained).

    Give speeds of runs alone on the card: a speed logged beside other runs is not the arm's own. A slower arm is read
    in the middle of its learning-rate schedule while the fastest has finished its own, so this reading favours fast
    arms: it bounds what the slower arm loses, no more. `unfused` names the arms that ran without fused kernels. An arm
    so slow that it had not been evaluated when the fastest one ended is `late`, and has no loss.
    Raises ValueError for an arm without a positive speed, and as `equal_steps`.
    """
    for arm in unfused:
        if arm not in curves:
            raise ValueError(f"unfused: no arm {arm!r}; wants some of {', '.join(curves)}")
    for arm in curves:
        if not tokens_per_second.get(arm, 0) > 0:
            raise ValueError(f"tokens_per_second: arm {arm!r} has {tokens_per_second.get(arm)}, wants a positive speed")
    points = {arm: (c.tokens / tokens_per_second[arm], c.losses) for arm, c in curves.items()}
    late: list[str] = []
    if seconds is None:
        end = min((float(x[-1]) for x, _ in points.values()), default=0.0)
        late = [arm for arm, (x, _) in points.items() if x[0] > end]
    in_time = {arm: point for arm, point in points.items() if arm not in late}
    return replace(_read("seconds", in_time, seconds), unfused=tuple(unfused), late=tuple(late))


def _read(axis: str, points: Mapping[str, tuple[np.ndarray, np.ndarray]], at: float | None) -> Reading:
    if not points:
        raise ValueError("curves: got none, wants at least one")
    if at is None:
        at = min(float(x[-1]) for x, _ in points.values())
    for arm, (x, _) in points.items():
        if not x[0] <= at <= x[-1]:
            raise ValueError(f"arm {arm!r} was evaluated from {axis} {x[0]:g} to {x[-1]:g}, not at {at:g}")
    return Reading(axis, at, {arm: float(np.interp(at, x, losses)) for arm, (x, losses) in points.items()})
