"""The numbers of a report: what each arm reached, how it differs from the baseline, and what may be said of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median

from depthroute.report import sequences
from depthroute.report.folders import Group
from depthroute.report.formats import amount, count, loss, p_value, signed
from depthroute.report.runs import Run
from depthroute.studies.statistics import PairedDifference, Summary, paired_difference, summarise


@dataclass(frozen=True)
class Arm:
    """What the finished runs of one arm reached. Losses are means of each run's last evaluations, in nats a token."""

    name: str
    is_baseline: bool
    seeds: tuple[int, ...]
    unfinished: tuple[int, ...]
    loss: Summary | None
    difference: PairedDifference | None  # arm minus baseline, over the seeds that both finished
    lower_in: int  # pairs in which this arm is below the baseline
    over_sequences: Summary | None  # arm minus baseline over the held-out sequences, where there is one pair of runs
    averaged: Summary | None  # the last loss of the averaged weights, where there are any
    averaged_over_sequences: Summary | None
    parameters: float | None
    residual_parameters: float | None
    tokens_per_second: float | None
    peak_memory_bytes: float | None


@dataclass(frozen=True)
class Comparison:
    """The numbers of one group; `point` is the group's place in the grid of a study, "" where there is none."""

    point: str
    arms: tuple[Arm, ...]
    baseline: str | None
    best: str | None
    unigram_entropy: float | None
    tail_evaluations: float | None  # None where the runs do not agree
    statement: tuple[str, ...]
    cautions: tuple[str, ...]


def compare(group: Group) -> Comparison:
    """Every number of the comparison table, the sentences that state it, and what limits it."""
    arms = tuple(_arm(group, name) for name in group.arms)
    ranked = _ranked(arms)
    best = ranked[0].name if ranked else None
    finished = [run for run in group.runs if run.finished]
    entropy = _common([run.number("unigram_entropy") for run in finished])
    tail = _common([run.number("tail_evaluations") for run in finished])
    return Comparison(
        point=group.point,
        arms=arms,
        baseline=group.baseline,
        best=best,
        unigram_entropy=entropy,
        tail_evaluations=tail,
        statement=tuple(_statement(group, arms, ranked, entropy)),
        cautions=tuple(_cautions(group, finished)),
    )


def _ranked(arms: Sequence[Arm]) -> list[Arm]:
    """Arms with a loss, the best first. Seeds differ by more than arms do, so an arm that lacks some of the baseline's
    stands where its paired difference puts it, and not where the mean over its own seeds does."""
    baseline = next((arm for arm in arms if arm.is_baseline and _has_loss(arm)), None)

    def standing(arm: Arm) -> float:
        return _mean(arm) if baseline is None or arm.difference is None else _mean(baseline) + arm.difference.mean

    return sorted((arm for arm in arms if _has_loss(arm)), key=standing)


def tail_losses(group: Group, arm: str) -> dict[int, float]:
    """Seed -> tail loss of the finished runs of one arm."""
    return {run.seed: run.number("tail_loss") for run in group.of(arm) if run.finished}  # type: ignore[misc]


def _arm(group: Group, name: str) -> Arm:
    runs = group.of(name)
    finished = [run for run in runs if run.finished]
    losses = tail_losses(group, name)
    difference, lower_in = None, 0
    if group.baseline not in (None, name):
        reference = tail_losses(group, str(group.baseline))
        shared = losses.keys() & reference.keys()
        if shared and all(isfinite(losses[seed]) and isfinite(reference[seed]) for seed in shared):
            difference = paired_difference(losses, reference)
            lower_in = sum(losses[seed] < reference[seed] for seed in difference.seeds)
    return Arm(
        name=name,
        is_baseline=name == group.baseline,
        seeds=tuple(losses),
        unfinished=tuple(run.seed for run in runs if not run.finished),
        loss=summarise(losses.values()) if losses else None,
        difference=difference,
        lower_in=lower_in,
        over_sequences=_over_sequences(group, name, sequences.PLAIN),
        averaged=_averaged(finished),
        averaged_over_sequences=_over_sequences(group, name, sequences.AVERAGED),
        parameters=_common([run.number("parameters") for run in finished]),
        residual_parameters=_common([run.number("residual_parameters") for run in finished]),
        tokens_per_second=_middle([run.number("tokens_per_second") for run in finished]),
        peak_memory_bytes=_middle([run.number("peak_memory_bytes") for run in finished]),
    )


def _over_sequences(group: Group, arm: str, key: str) -> Summary | None:
    """The difference to the baseline at the last evaluation of one pair of runs; of several, the seeds say more."""
    if group.baseline in (None, arm):
        return None
    pairs = group.pairs(arm)
    if len(pairs) != 1:
        return None
    found = sequences.differences(*pairs[0], key)
    return found[max(found)] if found else None


def _averaged(finished: Sequence[Run]) -> Summary | None:
    losses = [loss for run in finished if (loss := run.number("final_ema_loss")) is not None]
    return summarise(losses) if losses and len(losses) == len(finished) else None


def _statement(group: Group, arms: Sequence[Arm], ranked: Sequence[Arm], entropy: float | None) -> list[str]:
    if not ranked:
        return ["No run is finished yet, so there is nothing to compare."]
    if len(group.runs) == 1:
        return _state_run(group.runs[0], entropy)
    sentences = _state_best(group, ranked)
    sentences += _state_lead(group, ranked)
    sentences += _state_others(ranked[1:])
    sentences += _state_sequences(arms)
    sentences += _state_averages(arms)
    if entropy is not None:
        above = [arm.name for arm in ranked if _mean(arm) >= entropy]
        if above:
            sentences.append(
                f"{_join(above)} did not get below the unigram entropy of the held-out text ({loss(entropy)})."
            )
        else:
            sentences.append(
                f"Every finished arm is below the unigram entropy of the held-out text ({loss(entropy)}), "
                f"the worst by {loss(entropy - max(map(_mean, ranked)))}."
            )
    if diverged := [arm.name for arm in arms if arm.loss is not None and not isfinite(arm.loss.mean)]:
        sentences.append(f"{_join(diverged)} diverged in at least one seed and cannot be ranked.")
    return sentences


def _state_run(run: Run, entropy: float | None) -> list[str]:
    reached = run.number("tail_loss") or 0.0
    tokens, steps = run.number("tokens"), run.number("steps")
    after = f" after {amount(tokens)} tokens" if tokens is not None else ""
    after += f" ({count(steps)} steps)" if steps is not None else ""
    sentences = [f"{run.arm} reached a held-out loss of {loss(reached)} nats per token{after}."]
    if entropy is not None:
        side = "below" if reached < entropy else "above"
        sentences.append(
            f"That is {loss(abs(entropy - reached))} {side} the unigram entropy of the same text ({loss(entropy)})."
        )
    sentences.append("One run says nothing about the spread between seeds.")
    return sentences


def _state_best(group: Group, ranked: Sequence[Arm]) -> list[str]:
    best = ranked[0]
    summary = best.loss
    assert summary is not None
    spread = f" ± {loss(summary.standard_deviation)}" if summary.standard_deviation is not None else ""
    of = f"mean ± standard deviation of {summary.n} seeds" if summary.n > 1 else "one seed"
    reached = f"{loss(summary.mean)}{spread} nats per token ({of})"
    alike = len({frozenset(arm.seeds) for arm in ranked}) == 1
    lowest = f"{best.name} has the lowest held-out loss" + ("" if alike else ", seed by seed")
    if best.is_baseline:
        others = "; no other arm is below this baseline" if len(ranked) > 1 else ""
        return [f"{lowest}: {reached}{others}."]
    if best.difference is None:
        reason = "the study names no baseline"
        if group.baseline is not None:
            diverged = not all(map(isfinite, tail_losses(group, group.baseline).values()))
            reason = "the baseline diverged" if diverged else "it shares no finished seed with the baseline"
        return [f"{best.name} has the lowest held-out loss: {reached}; {reason}, so there is no paired difference."]
    difference = best.difference
    error = f" ± {loss(difference.standard_error)}" if difference.standard_error is not None else ""
    return [
        f"{lowest}: {reached}, a paired difference of {signed(difference.mean)}{error} to the baseline "
        f"{group.baseline}, lower in {best.lower_in} of {difference.n} {'pairs' if difference.n > 1 else 'pair'}.",
        _certainty(difference),
    ]


def _certainty(difference: PairedDifference) -> str:
    if difference.n == 1:
        return "One pair of runs cannot tell such a difference from chance."
    if difference.p is None:
        return f"All {difference.n} pairs differ by the same amount, so no test applies."
    test = f"two-sided paired t-test, n = {difference.n}, {p_value(difference.p)}, not corrected for the choice of arm"
    if difference.p < 0.05:
        return f"That is significant at the 5 % level ({test})."
    few = " With two pairs such a test is nearly blind: read the sign and the size."
    return f"That is not significant at the 5 % level ({test}).{few if difference.n == 2 else ''}"


def _state_lead(group: Group, ranked: Sequence[Arm]) -> list[str]:
    """How far the best arm is ahead of the next, where the baseline is neither (then it has been said)."""
    if len(ranked) < 2 or ranked[0].is_baseline or ranked[1].is_baseline:
        return []
    losses, next_losses = (tail_losses(group, arm.name) for arm in ranked[:2])
    if not losses.keys() & next_losses.keys():
        return []
    lead = paired_difference(losses, next_losses)
    error = f" ± {loss(lead.standard_error)}" if lead.standard_error is not None else ""
    test = f"n = {lead.n}" + (f", {p_value(lead.p)}" if lead.p is not None else "")
    return [f"To the next arm, {ranked[1].name}, it differs by {signed(lead.mean)}{error} ({test})."]


def _state_others(others: Sequence[Arm]) -> list[str]:
    parts = [
        f"{arm.name} {signed(arm.difference.mean)}"
        + (f" ± {loss(arm.difference.standard_error)}" if arm.difference.standard_error is not None else "")
        for arm in others
        if arm.difference is not None
    ]
    if not parts:
        return []
    return [f"Against the baseline the other arms differ by: {', '.join(parts)} (mean ± standard error)."]


def _state_sequences(arms: Sequence[Arm]) -> list[str]:
    parts, numbers = _over_sequences_parts(arms, averaged=False)
    if not parts:
        return []
    return [
        f"Sequence by sequence over the {count(max(numbers))} held-out ones, the last evaluations differ by: {parts} "
        "(mean ± standard error over sequences of one pair of runs each, which says nothing of the spread between "
        "seeds)."
    ]


def _state_averages(arms: Sequence[Arm]) -> list[str]:
    known = [(arm.name, arm.averaged.mean) for arm in arms if arm.averaged is not None]
    if not known:
        return []
    losses = ", ".join(f"{name} {loss(mean)}" for name, mean in known)
    text = f"With averaged weights the last evaluations are: {losses}"
    parts, _ = _over_sequences_parts(arms, averaged=True)
    return [f"{text}; sequence by sequence they differ by: {parts}." if parts else f"{text}."]


def _over_sequences_parts(arms: Sequence[Arm], averaged: bool) -> tuple[str, list[int]]:
    found = [(arm.name, arm.averaged_over_sequences if averaged else arm.over_sequences) for arm in arms]
    known = [(name, summary) for name, summary in found if summary is not None]
    texts = (f"{name} {signed(summary.mean)} ± {loss(summary.standard_error)}" for name, summary in known)
    return ", ".join(texts), [summary.n for _, summary in known]


def _cautions(group: Group, finished: Sequence[Run]) -> list[str]:
    cautions = []
    missing = [run for run in group.runs if not run.finished]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        cautions.append(
            f"{len(missing)} of {len(group.runs)} runs {verb} not finished and not part of these numbers (see “Runs”)."
        )
    for key, what in (
        ("tokens", "numbers of training tokens"),
        ("unigram_entropy", "held-out texts (their unigram entropies differ)"),
        ("tail_evaluations", "numbers of evaluations in the tail mean"),
    ):
        if len({run.number(key) for run in finished}) > 1:
            cautions.append(f"The finished runs have different {what}: their losses are not on equal terms.")
    environments = [run.environment for run in finished if run.environment]
    if len(commits := {str(found.get("commit")) for found in environments}) > 1:
        cautions.append(f"The runs come from {len(commits)} different commits.")
    if any(found.get("dirty") for found in environments):
        cautions.append("Some of the code that ran had changes that are in no commit.")
    if len({str(found.get("devices")) for found in environments}) > 1:
        cautions.append("The runs used different devices: their speeds and memory are not on equal terms.")
    return cautions


def _has_loss(arm: Arm) -> bool:
    return arm.loss is not None and isfinite(arm.loss.mean)


def _mean(arm: Arm) -> float:
    assert arm.loss is not None
    return arm.loss.mean


def _common(values: Sequence[float | None]) -> float | None:
    """The value on which all agree, None where they do not."""
    return values[0] if len(set(values)) == 1 else None


def _middle(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _join(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
