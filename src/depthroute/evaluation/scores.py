"""From the items of lm-eval to the numbers that two models are compared by, and the tables of an evaluation."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

from depthroute.evaluation.results import as_number
from depthroute.evaluation.significance import Comparison, compare_tasks

# What a task is compared by: the first of these that it has.
COMPARED = ("acc_norm", "acc", "exact_match", "pass@1", "pass_at_1", "word_perplexity")

Items = Mapping[str, Sequence[Mapping[str, Any]]]  # task -> its items


def compared_metric(items: Sequence[Mapping[str, Any]]) -> str:
    """The metric that a task is compared by: of `COMPARED`, or the first that it has."""
    metrics = items[0]["metrics"]
    return next((name for name in COMPARED if name in metrics), metrics[0])


def compare_models(first: tuple[str, Mapping[str, Items]], second: tuple[str, Mapping[str, Items]]) -> Comparison:
    """Two models, each (name, unit -> task -> items), a unit being a task or all tasks of a group together.

    Perplexities are compared by nats: the mean over items weighs each by its words (or bytes), so that its exponential
    is the perplexity. A unit is left out where an item of either model has no finite score: without such items it would
    be compared on those that the worse model can do. Raises ValueError where the two have other tasks or other items.
    """
    names = (first[0], second[0])
    found = []
    weights: dict[str, Mapping[Hashable, float]] = {}
    for _, units in (first, second):
        scores: dict[str, Mapping[Hashable, float]] = {}
        for unit, tasks in units.items():
            label, values, shares = _unit_scores(unit, tasks)
            scores[label] = values
            if shares:
                weights.setdefault(label, shares)
        found.append(scores)
    sentences = {label: _why_left_out(label, names, found) for label in found[0]}
    left_out = {label: sentence for label, sentence in sentences.items() if sentence}
    one, two = ({label: of for label, of in scores.items() if label not in left_out} for scores in found)
    if left_out and not one and not two:
        return Comparison(*names, (), tuple(left_out.values()))
    weights = {label: shares for label, shares in weights.items() if label not in left_out}
    return replace(compare_tasks(one, two, names=names, weights=weights), left_out=tuple(left_out.values()))


def _why_left_out(
    label: str, names: tuple[str, str], found: Sequence[Mapping[str, Mapping[Hashable, float]]]
) -> str | None:
    """The sentence on a task that can not be compared; None where it can."""
    faults = []
    for name, scores in zip(names, found, strict=True):
        values = list(scores.get(label, {}).values())
        if strange := [value for value in values if not isfinite(value)]:
            kinds = " or ".join(sorted({str(value) for value in strange}))
            faults.append(f"the scores of {name} on {len(strange)} of {len(values)} items are not finite ({kinds})")
    return f"{label} is not compared: {', '.join(faults)}" if faults else None


def _unit_scores(unit: str, tasks: Items) -> tuple[str, dict[Hashable, float], dict[Hashable, float]]:
    metric = ""
    scores: dict[Hashable, float] = {}
    weights: dict[Hashable, float] = {}
    for task, items in tasks.items():
        metric = compared_metric(items)
        # A task with several filters has each item once for each; the first filter is the strict one.
        for item in (item for item in items if item["filter"] == items[0]["filter"]):
            key, value = f"{task} {item['doc_id']} {item['doc_hash'][:12]}", item[metric]
            # float also reads the names of what is not finite, as which a saved file has it.
            if isinstance(value, list):
                scores[key], weights[key] = -float(value[0]) / value[1], float(value[1])
            else:
                scores[key] = float(value)
    return f"{unit} {'log ' if weights else ''}{metric}", scores, weights


def score_rows(model: Mapping[str, Any]) -> list[list[str]]:
    """One row for each metric of each task and group of one model: task, shots, items, metric, value, error."""
    rows = []
    for name, found in {**model["groups"], **model["tasks"]}.items():
        for key, saved in found["metrics"].items():
            metric, comma, filter_name = key.partition(",")
            value = as_number(saved)
            if not comma or metric.endswith("_stderr") or value is None:
                continue
            error = as_number(found["metrics"].get(f"{metric}_stderr,{filter_name}"))
            label = metric if filter_name in ("none", "create_test") else f"{metric} ({filter_name})"
            spread = "" if error is None or not isfinite(error) else f"{error:.4f}"
            shots = "" if found.get("shots") is None else str(found["shots"])
            rows.append([name, shots, str(found["items"]), label, f"{value:.4f}", spread])
    return rows


def notes(model: Mapping[str, Any]) -> list[str]:
    """What is to be known beside the numbers of one model: how they were made, and what is not the standard task."""
    settings = model["settings"]
    data = "local files" if settings["data"] == "local" else "the hub's data"
    lines = [
        f"lm-eval {settings['lm_eval']}, {data}, {model['dtype']} on {model['device']}, batch size "
        f"{settings['batch_size']}, context {settings['max_length']:,} tokens"
    ]
    if settings["limit"] is not None:
        lines.append(f"only the first {settings['limit']} items of each task: not the score of the whole task")
    lines += _not_finite(model)
    return lines + [f"{task}: {found['deviation']}" for task, found in model["tasks"].items() if found.get("deviation")]


def _not_finite(model: Mapping[str, Any]) -> list[str]:
    """A line for each task with scores that are nan or infinite. Its accuracies are finite all the same."""
    found: dict[str, list[str]] = {}
    for task, _, _, metric, value, _ in score_rows(model):
        if not isfinite(float(value)):
            found.setdefault(task, []).append(f"{metric} ({value})")
    return [
        f"{task} has no finite {', '.join(said)}: look at the weights and the items before other scores of this model "
        "are believed"
        for task, said in found.items()
    ]


def unlike(models: Mapping[str, Mapping[str, Any]], baseline: str, candidate: str) -> list[str]:
    """What two models were not run alike in, so that a difference may not be the models' own."""
    first, second = models[baseline], models[candidate]
    contexts = [f"{model['settings']['max_length']:,} tokens" for model in (first, second)]
    found = {
        "dtypes": (first["dtype"], second["dtype"], "; --dtype runs both in one"),
        "devices": (first["device"], second["device"], ""),
        "contexts": (*contexts, ""),
    }
    return [
        f"other {what}: {baseline} {one}, {candidate} {other}, which may be part of a difference{advice}"
        for what, (one, other, advice) in found.items()
        if one != other
    ]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the last columns hold numbers."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


SCORE_HEAD = ("task", "shots", "items", "metric", "value", "standard error")


def evaluation_markdown(record: Mapping[str, Any], comparisons: Sequence[Comparison]) -> str:
    """evaluation.md: the scores of every model, then how each differs from the first."""
    parts = []
    for name, model in record["models"].items():
        lines = "".join(f"- {note}\n" for note in notes(model))
        parts.append(f"## {name}\n\n{table(SCORE_HEAD, score_rows(model))}\n{lines}")
    for comparison in comparisons:
        cautions = [*comparison.left_out, *unlike(record["models"], comparison.baseline, comparison.candidate)]
        lines = "".join(f"- {caution}\n" for caution in cautions)
        found = [f"## {comparison.candidate} against {comparison.baseline}\n"]
        found += [comparison.to_markdown(), _TESTS] if comparison.tasks else []
        parts.append("\n".join([*found, lines] if lines else found))
    return "\n".join(parts)


_TESTS = """\
Differences are the second model minus the first. p: the exact two-sided McNemar test where each item is right or
wrong, the paired bootstrap elsewhere; Holm's correction over the tasks of the table. Perplexities are compared by nats.
"""
