"""Tables in Markdown for the README of a record: of the runs of a study, finished or not, and of training steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from depthroute.report import formats
from depthroute.report.comparison import Arm, Comparison
from depthroute.report.curves import difference_band
from depthroute.report.folders import Folder, Group
from depthroute.report.probes import Probe, read_probe
from depthroute.report.runs import Run
from depthroute.studies.comparisons import UNFUSED
from depthroute.studies.statistics import PairedDifference, Summary, paired_difference


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with one line for each row."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def steps_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """The rows of `bench train`'s train.json, each arm beside the first one of its preset."""
    columns = ("shape", "scheme", "tokens/s", "of additive", "step, ms", "busy, ms", "peak memory, GiB", "of additive")
    return table((*columns, "first step, s"), map(_step_cells, rows))


def _step_cells(row: Mapping[str, Any]) -> list[str]:
    speed = row["tokens_per_second"]
    return [
        row["preset"],
        f"`{row['scheme']}`",
        f"{speed['median']:,.0f} ({speed['least']:,.0f} to {speed['most']:,.0f})",
        f"{row['of_first']:.3f}",
        f"{row['step_ms']:.2f}",
        f"{row['busy_ms']:.2f}",
        f"{row['peak_memory'] / 2**30:.2f}",
        f"{row['memory_of_first']:.3f}",
        f"{row['first_step_s']:.0f}",
    ]


def with_error(summary: Summary | None, *, signed: bool = False) -> str:
    """A mean of losses; a difference (`signed`) with its standard error and n, a loss with its standard deviation."""
    if summary is None:
        return formats.ABSENT
    error = summary.standard_error if signed else summary.standard_deviation
    spread = "" if error is None else f" ± {error:.4f}"
    n = f" (n = {summary.n})" if signed else ""
    return f"{(formats.signed if signed else formats.loss)(summary.mean)}{spread}{n}"


def paired(group: Group, arm: str, other: str, key: str = "tail_loss") -> PairedDifference | None:
    """One number of the summaries, arm minus other, over the seeds that both have finished; None without any."""
    left, right = ({run.seed: run.number(key) for run in group.of(name) if run.finished} for name in (arm, other))
    seeds = {seed for seed in left.keys() & right.keys() if left[seed] is not None and right[seed] is not None}
    if not seeds:
        return None
    return paired_difference(*({seed: side[seed] or 0.0 for seed in seeds} for side in (left, right)))


def arms_table(group: Group, comparison: Comparison) -> str:
    """A row for each arm: seeds, losses, the paired difference to the baseline, speed, memory and parameters."""
    speed = next((arm.tokens_per_second for arm in comparison.arms if arm.is_baseline), None)
    columns = ["arm", "seeds", "held-out loss", f"minus {group.baseline}", "p", "at the last step"]
    columns += ["tokens/s", f"of {group.baseline}", "peak memory", "scheme's parameters"]
    return table(columns, (_arm_cells(group, arm, speed) for arm in comparison.arms))


def _arm_cells(group: Group, arm: Arm, baseline_speed: float | None) -> list[str]:
    runs = [run for run in group.of(arm.name) if run.finished]
    unfused = "\\*" if any(str((run.summary or {}).get("scheme")) in UNFUSED for run in runs) else ""
    ratio = arm.tokens_per_second / baseline_speed if arm.tokens_per_second and baseline_speed else None
    last = None if arm.is_baseline else paired(group, arm.name, str(group.baseline), "final_loss")
    return [
        f"`{arm.name}`",
        ", ".join(map(str, arm.seeds)) or "none finished",
        with_error(arm.loss),
        formats.ABSENT if arm.is_baseline else with_error(arm.difference, signed=True),
        formats.p_alone(arm.difference.p if arm.difference else None),
        formats.loss(fmean(run.number("final_loss") or 0.0 for run in runs)) if last is None and runs
        else with_error(last, signed=True),
        formats.count(arm.tokens_per_second) + unfused,
        formats.ABSENT if ratio is None else f"{ratio:.2f}x",
        formats.memory(arm.peak_memory_bytes),
        formats.count(arm.residual_parameters),
    ]  # fmt: skip


def pairs_table(group: Group, pairs: Iterable[tuple[str, str]]) -> str:
    """A row for each pair of arms that share a finished seed: the differences of the tail means and of the ends."""
    rows = []
    for arm, other in pairs:
        tail, last = (paired(group, arm, other, key) for key in ("tail_loss", "final_loss"))
        p = formats.p_alone(tail.p if tail else None)
        rows.append([f"`{arm}` minus `{other}`", with_error(tail, signed=True), p, with_error(last, signed=True)])
    return table(["", "held-out loss", "p", "at the last step"], rows)


def curve_table(group: Group, steps: Sequence[int]) -> str:
    """The losses of the baseline, and of each other arm minus those, mean over the pairs of seeds, at some steps."""
    rows = []
    for arm in group.arms:
        if arm == group.baseline:
            finished = [run for run in group.of(arm) if run.finished]
            rows.append([f"`{arm}`", *(formats.loss(_mean_at(finished, step)) for step in steps)])
        else:
            band = difference_band(group.pairs(arm))
            per_step = _tokens_per_step(group)
            found = dict(zip(band.tokens / per_step, band.mean, strict=True)) if band is not None else {}
            rows.append([f"`{arm}`, difference", *(formats.signed(found.get(step)) for step in steps)])
    return table(["step", *(f"{step:,}" for step in steps)], rows)


def _mean_at(runs: Sequence[Run], step: int) -> float | None:
    losses = [line["loss"] for run in runs for line in run.evaluations if line["step"] == step]
    return fmean(losses) if losses else None


def _tokens_per_step(group: Group) -> float:
    evaluations = (line for run in group.runs for line in run.evaluations if line["step"])
    return next((line["tokens"] / line["step"] for line in evaluations), 1.0)


def readings_table(readings: Sequence[Mapping[str, Any]], arms: Sequence[str]) -> str:
    """The losses of the arms read at equal steps and at equal seconds, lowest at the end first."""
    by_axis = {reading["axis"]: reading for reading in readings}
    if "step" not in by_axis:
        return "Fewer than two arms are finished."
    steps, seconds = by_axis["step"], by_axis.get("seconds", {"at": 0.0, "losses": {}, "late": ()})
    rows = [
        [f"`{arm}`", *(_reading(reading, arm) for reading in (steps, seconds))]
        for arm in sorted((arm for arm in arms if arm in steps["losses"]), key=lambda arm: steps["losses"][arm])
    ]
    return table(["arm", f"at step {steps['at']:,.0f}", f"after {seconds['at']:,.0f} s of training"], rows)


def seeds_of(readings: Sequence[Mapping[str, Any]]) -> str:
    """Whose losses `readings_table` shows."""
    if not readings:
        return ""
    seeds = readings[0]["seeds"]
    if seeds is None:
        return "Means over each arm's own seeds: none is common to all."
    return f"Means over the seeds that all arms have: {', '.join(map(str, seeds))}."


def _reading(reading: Mapping[str, Any], arm: str) -> str:
    return "not evaluated yet" if arm in reading["late"] else formats.loss(reading["losses"].get(arm))


def missing_runs(folder: Folder) -> str:
    """A line for each run that is not finished, with its reason, and for what of a finished one cannot be read."""
    lines = []
    for group in folder.groups:
        point = f", {group.point}" if group.point else ""
        for run in group.runs:
            if not run.finished:
                reason = f": {run.reason}" if run.reason else ""
                lines.append(f"- `{run.arm}`{point}, seed {run.seed}: **{run.state}**{reason}")
            lines += [f"- `{run.arm}`{point}, seed {run.seed}: {problem}" for problem in run.problems]
    return "\n".join(lines) or "All runs are finished."


def probes_of(group: Group, arm: str) -> list[Probe]:
    """The probes of an arm's finished runs, by seed."""
    found = (read_probe(run.folder, []) for run in group.of(arm) if run.finished)
    return [probe for probe in found if probe is not None]


def probe_table(groups: Iterable[tuple[str, Group]]) -> str:
    """The readings of the probes of each arm, means over its seeds; the groups come with what their arms are named."""
    rows = []
    for suffix, group in groups:
        for arm in group.arms:
            probes = probes_of(group, arm)
            labels = list(dict.fromkeys(row.label for probe in probes for row in probe.rows))
            for label in labels:
                if label.startswith("weight on"):  # other sources in every run
                    continue
                same = [row for probe in probes for row in probe.rows if row.label == label]
                cells = (_mean([getattr(row, key) for row in same]) for key in ("trained", "null", "excess"))
                rows.append([f"`{arm}`{suffix}", label, *cells, str(len(same))])
    if not rows:
        return "No run is probed yet."
    return table(["arm", "reading", "trained", "random queries", "excess", "seeds"], rows)


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return formats.decimals(fmean(known)) if known else formats.ABSENT
