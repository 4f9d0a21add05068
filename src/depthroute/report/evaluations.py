"""Reading what `depthroute evaluate` wrote, and saying in sentences what it means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from depthroute.evaluation.results import RECORD, as_number
from depthroute.evaluation.scores import notes, unlike
from depthroute.report.formats import decimals, p_value
from depthroute.report.runs import read_json
from depthroute.report.shapes import NUMBER, OPTIONAL_NUMBER, TEXT, WHOLE, mismatch

LEVEL = 0.05  # of significance

_SETTINGS = {"max_length": WHOLE, "batch_size": WHOLE, "data": TEXT, "lm_eval": TEXT}
_MODEL = {"settings": _SETTINGS, "dtype": TEXT, "device": TEXT, "tasks": {}, "groups": {}}
_TASK = {"metrics": {}, "items": WHOLE}
_COMPARED = {
    "task": TEXT,
    "items": WHOLE,
    "baseline": NUMBER,
    "candidate": NUMBER,
    "difference": NUMBER,
    "test": TEXT,
    "only_baseline": OPTIONAL_NUMBER,
    "only_candidate": OPTIONAL_NUMBER,
    "low": NUMBER,
    "high": NUMBER,
    "p": NUMBER,
    "p_holm": NUMBER,
}
_SHAPE = {"models": {}, "comparisons": [{"baseline": TEXT, "candidate": TEXT, "tasks": [_COMPARED]}]}


@dataclass(frozen=True)
class Score:
    """A value with lm-eval's standard error, where it has one."""

    value: float
    error: float | None


@dataclass(frozen=True)
class ScoreRow:
    """One metric of one task or group, for every model that has it."""

    task: str
    metric: str
    shots: int | None
    items: int
    scores: Mapping[str, Score]


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found: `found` is its evaluation.json, `label` names it where a page has several."""

    label: str
    path: Path
    found: Mapping[str, Any]

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(self.found["models"])

    @property
    def comparisons(self) -> list[Mapping[str, Any]]:
        return self.found["comparisons"]

    @property
    def rows(self) -> tuple[ScoreRow, ...]:
        return tuple(_rows(self.found["models"]))

    @property
    def statement(self) -> tuple[str, ...]:
        return tuple(_statement(self))

    @property
    def cautions(self) -> tuple[str, ...]:
        """What is to be known beside the numbers: how they were made, alike or not, and what is no standard task."""
        found: dict[str, list[str]] = {}
        for name, model in self.found["models"].items():
            for note in notes(model):
                found.setdefault(note, []).append(name)
        not_alike = [
            caution
            for comparison in self.comparisons
            for caution in unlike(self.found["models"], comparison["baseline"], comparison["candidate"])
        ]
        left_out = dict.fromkeys(one for comparison in self.comparisons for one in comparison.get("left_out", ()))
        noted = (
            note if len(names) == len(self.models) else f"{', '.join(names)}: {note}" for note, names in found.items()
        )
        return (*not_alike, *left_out, *noted)

    def item_files(self, task: str) -> dict[str, Path]:
        """Model -> what it said and scored on every item of a task, where that is there."""
        places = {model: self.path.parent / model / f"{task}.items.jsonl" for model in self.models}
        return {model: place for model, place in places.items() if place.is_file()}


def read_evaluation(folder: Path, problems: list[str], label: str = "") -> Evaluation | None:
    """The evaluation.json of a folder; None where there is none, or it is damaged, which `problems` then says."""
    found = read_json(folder / RECORD, dict, problems)
    if found is None:
        return None
    if fault := _fault(found):
        problems.append(f"{RECORD}: damaged ({fault})")
        return None
    return Evaluation(label or " and ".join(found["models"]), folder / RECORD, found)


def significant(task: Mapping[str, Any]) -> bool:
    """Whether the difference on a task is more than chance, corrected for the number of tasks."""
    return task["p_holm"] < LEVEL


def _fault(found: Mapping[str, Any]) -> str | None:
    if fault := mismatch(found, _SHAPE):
        return fault
    if not found["models"]:
        return "models is empty"
    for name, model in found["models"].items():
        if fault := mismatch(model, _MODEL, f"models.{name}"):
            return fault
        for part in ("tasks", "groups"):
            for task, scores in model[part].items():
                if fault := mismatch(scores, _TASK, f"models.{name}.{part}.{task}"):
                    return fault
    for comparison in found["comparisons"]:
        for name in (comparison["baseline"], comparison["candidate"]):
            if name not in found["models"]:
                return f"a comparison is with {name}, which is not among the models"
        # Earlier versions had no such list.
        if fault := mismatch(comparison.get("left_out", []), [TEXT], "left_out"):
            return fault
    return None


def _rows(models: Mapping[str, Any]) -> Iterator[ScoreRow]:
    places = {
        (part, task, metric): None
        for model in models.values()
        for part in ("groups", "tasks")
        for task, found in model[part].items()
        for metric, value in found["metrics"].items()
        if "," in metric and "_stderr," not in metric and as_number(value) is not None
    }
    for part, task, metric in places:
        scores, about = {}, {}
        for name, model in models.items():
            found = model[part].get(task, {"metrics": {}})
            if (value := as_number(found["metrics"].get(metric))) is not None:
                error = as_number(found["metrics"].get(metric.replace(",", "_stderr,")))
                scores[name], about = Score(value, None if error is None or not isfinite(error) else error), found
        plain, _, filter_name = metric.partition(",")
        label = plain if filter_name in ("none", "create_test") else f"{plain} ({filter_name})"
        yield ScoreRow(task, label, about.get("shots"), about["items"], scores)


def _statement(evaluation: Evaluation) -> Iterator[str]:
    if not evaluation.comparisons:
        tasks = {row.task for row in evaluation.rows}
        yield f"{' and '.join(evaluation.models)} on {len(tasks)} {'tasks' if len(tasks) > 1 else 'task'}."
    for comparison in evaluation.comparisons:
        yield _state_comparison(comparison) if comparison["tasks"] else _state_no_comparison(comparison)
        if comparison["tasks"] and (left_out := len(comparison.get("left_out", ()))):
            yield f"{left_out} {'tasks are' if left_out > 1 else 'task is'} not compared, as the notes say."


def _state_no_comparison(comparison: Mapping[str, Any]) -> str:
    return (
        f"{comparison['candidate']} and {comparison['baseline']} are not compared: "
        "there is no task on which all scores of both are finite."
    )


def _state_comparison(comparison: Mapping[str, Any]) -> str:
    tasks = comparison["tasks"]
    found = [task for task in tasks if significant(task)]
    several = len(tasks) > 1
    level = "5 % level, corrected for their number" if several else "5 % level"
    pair = f"{comparison['candidate']} and {comparison['baseline']}"
    if found:
        said = ", ".join(f"{task['task']} {decimals(task['difference'], 4, True)}" for task in found)
        where = f"{len(found)} of {len(tasks)} tasks" if several else "the task"
        return (
            f"{pair} differ significantly on {where} ({level}): {said} "
            f"({comparison['candidate']} minus {comparison['baseline']})."
        )
    least = min(tasks, key=lambda task: task["p_holm"])
    where = f"any of {len(tasks)} tasks" if several else "the task"
    return (
        f"{pair} do not differ significantly on {where} ({level}); the smallest "
        f"{'corrected ' if several else ''}p-value is that of {least['task']}, {p_value(least['p_holm'])}."
    )
