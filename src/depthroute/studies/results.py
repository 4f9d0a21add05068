"""What a study folder holds of its runs: their states, one tidy row for each, and the tables made of them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from depthroute.files import write_json, write_text
from depthroute.studies.comparisons import compare
from depthroute.studies.gains import compute_gains
from depthroute.studies.study import Run, Study
from depthroute.training.callbacks import read_metrics
from depthroute.training.recipe import differing_keys, load_recipe

FINISHED, FAILED, UNFINISHED, NOT_STARTED = "finished", "failed", "unfinished", "not started"

# Columns of the CSV that hold what a run's summary says; the second group depends on the machine and its load.
SUMMARY_COLUMNS = (
    "scheme",
    "parameters",
    "residual_parameters",
    "steps",
    "tokens",
    "final_loss",
    "tail_loss",
    "tail_evaluations",
    "unigram_entropy",
)
TIMING_COLUMNS = ("tokens_per_second", "peak_memory_bytes", "seconds_to_first_step", "seconds")

_FAILURE = "failure.json"


def run_folder(out: Path, run: Run) -> Path:
    """Where a run of the study in `out` trains."""
    return out / "runs" / run.label / f"seed-{run.seed}"


def log_file(out: Path, run: Run) -> Path:
    """Where a run's output goes; kept whatever became of it."""
    return out / "logs" / run.label / f"seed-{run.seed}.log"


def recipe_file(out: Path, run: Run) -> Path:
    """The recipe that a run is started with: `depthroute train` runs it too."""
    return out / "recipes" / run.label / f"seed-{run.seed}.yaml"


def state(out: Path, run: Run) -> tuple[str, str]:
    """A run's state and, where it failed, the reason."""
    folder = run_folder(out, run)
    if (folder / "summary.json").is_file():
        return FINISHED, ""
    if (folder / _FAILURE).is_file():
        return FAILED, str(json.loads((folder / _FAILURE).read_text(encoding="utf-8"))["error"])
    return (UNFINISHED if (folder / "recipe.yaml").is_file() else NOT_STARTED), ""


def record_failure(out: Path, run: Run, reason: str) -> None:
    """Keep why a run failed in its folder, until it is started again."""
    folder = run_folder(out, run)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / _FAILURE, {"error": reason, "log": log_file(out, run).relative_to(out).as_posix()})


def forget_failure(out: Path, run: Run) -> None:
    """A run is tried again."""
    (run_folder(out, run) / _FAILURE).unlink(missing_ok=True)


def check_place(out: Path, runs: Sequence[Run]) -> None:
    """ValueError where a folder that a run would use holds a run of another recipe.

    A finished run may have another name: it may be the copy of another study's.
    """
    for run in runs:
        path = run_folder(out, run) / "recipe.yaml"
        if path.is_file():
            finished = state(out, run)[0] == FINISHED
            keys = [key for key in differing_keys(load_recipe(path), run.recipe) if key != "name" or not finished]
            if keys:
                raise ValueError(
                    f"{path.parent} holds a run of another recipe ({', '.join(keys)} differ); "
                    "choose another folder for the study, or remove that one"
                )


def rows(out: Path, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row for each run: what it is, its state, and where it is finished what its summary says."""
    found = []
    for run in runs:
        status, reason = state(out, run)
        summary = _read_json(run_folder(out, run) / "summary.json") if status == FINISHED else {}
        known = {key: summary.get(key) for key in (*SUMMARY_COLUMNS, *TIMING_COLUMNS)}
        found.append(
            {
                "label": run.label,
                "arm": run.arm,
                **run.point,
                "seed": run.seed,
                "status": status,
                "reason": reason,
                **known,
            }
        )
    return found


def evaluations(out: Path, run: Run) -> list[dict[str, float]]:
    """The evaluation records of a run so far."""
    return [line for line in read_metrics(run_folder(out, run) / "metrics.jsonl") if line["kind"] == "evaluation"]


def write_results(study: Study, runs: Sequence[Run], out: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Write results.csv (one row for each run) and results.json (rows and comparisons); returns both."""
    table = rows(out, runs)
    finished = {run.name: evaluations(out, run) for run in runs if state(out, run)[0] == FINISHED}
    comparisons = compare(study, table, finished)
    if study.compute_gain:
        comparisons["compute_gain"] = compute_gains(study, runs, table)
    write_text(out / "results.csv", _as_csv(table))
    write_json(
        out / "results.json",
        {
            "name": study.name,
            "description": study.description,
            "baseline": study.baseline,
            "axes": list(study.grid),
            "runs": table,
            **comparisons,
        },
    )
    return table, comparisons


def _as_csv(table: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(table[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
