"""From the items of lm-eval to the numbers that two models are compared by, and the tables of an evaluation."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

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
    is the perplexity. Raises ValueError where the two have other tasks or other items.
    """
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
    return compare_tasks(found[0], found[1], names=(first[0], second[0]), weights=weights)


def _unit_scores(unit: str, tasks: Items) -> tuple[str, dict[Hashable, float], dict[Hashable, float]]:
    metric = ""
    scores: dict[Hashable, float] = {}
    weights: dict[Hashable, float] = {}
    for task, items in tasks.items():
        metric = compared_metric(items)
        # A task with several filters has each item once for each; the first filter is the strict one.
        for item in (item for item in items if item["filter"] == items[0]["filter"]):
            key, value = f"{task} {item['doc_id']} {item['doc_hash'][:12]}", item[metric]
            if isinstance(value, list):
                scores[key], weights[key] = -value[0] / value[1], float(value[1])
            else:
                scores[key] = float(value)
    return f"{unit} {'log ' if weights else ''}{metric}", scores, weights


def score_rows(model: Mapping[str, Any]) -> list[list[str]]:
    """One row for each metric of each task and group of one model: task, shots, items, metric, value, error."""
    rows = []
    for name, found in {**model["groups"], **model["tasks"]}.items():
        for key, value in found["metrics"].items():
            metric, comma, filter_name = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = found["metrics"].get(f"{metric}_stderr,{filter_name}")
            label = metric if filter_name in ("none", "create_test") else f"{metric} ({filter_name})"
            spread = f"{error:.4f}" if isinstance(error, int | float) else ""
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
    return lines + [f"{task}: {found['deviation']}" for task, found in model["tasks"].items() if found.get("deviation")]


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
        cautions = unlike(record["models"], comparison.baseline, comparison.candidate)
        lines = "".join(f"- {caution}\n" for caution in cautions)
        head = f"## {comparison.candidate} against {comparison.baseline}"
        parts.append(f"{head}\n\n{comparison.to_markdown()}\n{_TESTS}" + (f"\n{lines}" if lines else ""))
    return "\n".join(parts)


_TESTS = """\
Differences are the second model minus the first. p: the exact two-sided McNemar test where each item is right or
wrong, the paired bootstrap elsewhere; Holm's correction over the tasks of the table. Perplexities are compared by nats.
"""
