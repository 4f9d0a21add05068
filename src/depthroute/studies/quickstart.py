"""The quickstart: four ways to connect layers, trained on the embedded books and compared on books held out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from depthroute.files import write_json
from depthroute.models.text import generate_text
from depthroute.report import build_report
from depthroute.studies.grid import StudyResult, run_study
from depthroute.training.shipped import recipe_folder

PROMPT = "The old man looked out over the sea and"
NEW_TOKENS = 100


def run_quickstart(out: str | Path, workers: int | None = None, *, console: Console | None = None) -> StudyResult:
    """Run the study recipes/quickstart.yaml in `out`, print its table, generate from its best arm, write the report.

    Interrupted, it goes on where it was. `samples.json` holds one text of the first seed of the arm with the lowest
    mean loss. Raises RuntimeError, with the reasons, if a run failed.
    """
    console = console or Console()
    result = run_study(recipe_folder() / "quickstart.yaml", out, workers, report=False, console=console)
    if result.failed:
        raise RuntimeError("; ".join(f"{row['label']}/seed-{row['seed']}: {row['reason']}" for row in result.failed))
    if not result.finished:
        raise RuntimeError(f"{out}: some runs are held by another process; start again when it has ended")
    sample = sample_from_best(result)
    write_json(result.folder / "samples.json", [sample])
    said = f"\n{sample['arm']} goes on from a prompt:\n{sample['prompt']}{sample['text']}"
    console.print(said, markup=False, highlight=False, soft_wrap=not console.is_terminal)
    page = build_report(result.folder)
    console.print(f"\nReport: {page}", markup=False, highlight=False, soft_wrap=True)
    return replace(result, report=page)


def sample_from_best(result: StudyResult, prompt: str = PROMPT) -> dict[str, str]:
    """How the first seed of the arm with the lowest mean loss goes on from a prompt: arm, prompt, new text."""
    finished: list[dict[str, Any]] = [arm for arm in result.comparisons["arms"] if arm["loss"]]
    best = min(finished, key=lambda arm: arm["loss"]["mean"])["label"]
    seed = min(row["seed"] for row in result.runs if row["label"] == best and row["status"] == "finished")
    folder = result.folder / "runs" / best / f"seed-{seed}"
    return {"arm": best, "prompt": prompt, "text": generate_text(folder, prompt, max_new_tokens=NEW_TOKENS)}
