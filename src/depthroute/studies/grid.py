"""`run_study`: a study file, run by run, to its tables and its report."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from depthroute.errors import nearest, nearest_path
from depthroute.files import write_text
from depthroute.studies import results, worker
from depthroute.studies.live import LiveTable
from depthroute.studies.scheduling import Slot, free_slots, run_all
from depthroute.studies.study import Run, Study, load_study, runs, same_run
from depthroute.studies.tables import tables
from depthroute.terminal import show
from depthroute.training import strict_yaml
from depthroute.training.recipe import load_recipe, recipe_text

Starter = Callable[[Path, Run, Slot], subprocess.Popen]

_ERROR_LINE = re.compile(r"^[\w.]*(Error|Exception|Interrupt)\b")


@dataclass(frozen=True)
class StudyResult:
    """What a study came to: `runs` are the rows of results.csv, `comparisons` what results.json says beside them."""

    folder: Path
    study: Study
    runs: list[dict[str, Any]]
    comparisons: dict[str, Any]
    report: Path | None = None

    @property
    def failed(self) -> list[dict[str, Any]]:
        """The rows of the runs that failed, each with its reason."""
        return [row for row in self.runs if row["status"] == results.FAILED]

    @property
    def finished(self) -> bool:
        """Whether every run of the study is finished."""
        return all(row["status"] == results.FINISHED for row in self.runs)


def run_study(
    source: str | Path | Mapping[str, Any],
    out: str | Path,
    workers: int | None = None,
    *,
    overrides: Iterable[str] = (),
    only: Collection[str] = (),
    reuse: Sequence[str | Path] = (),
    report: bool = True,
    console: Console | None = None,
    start: Starter | None = None,
) -> StudyResult:
    """Run what a study still lacks, one run on each free GPU (or core), write and print its tables, and its report.

    The folder `out` holds study.yaml, runs/<label>/seed-<s>/ (run folders), logs/, results.csv (one row for each run),
    results.json and report/. Finished runs are never repeated, others go on from their last checkpoint, a run that
    fails stays in the tables with its reason and is tried again the next time. However the study ends, no process of
    it stays behind. `workers`: as `scheduling.free_slots`. `overrides`: as `load_study`. `only`: run these arms alone.
    `reuse`: other study folders, whose finished runs of the same recipes are copied instead of run. `report`: whether
    to build the page. `start`: how a run becomes a process.
    Raises ValueError for a wrong study, an arm that does not exist, and a folder that holds runs of other recipes;
    FileNotFoundError where `reuse` names no study folder.
    """
    # Imported first, so that a missing extra is told now and not when all is done.
    build_report = importlib.import_module("depthroute.report").build_report if report else None
    study = load_study(source, overrides)
    wanted = runs(study)
    out = Path(out)
    check_only(study, only)
    check_reuse(reuse)
    results.check_place(out, wanted)
    slots = free_slots(workers)
    write_text(_made(out) / "study.yaml", study_text(study))
    copy_finished(out, wanted, reuse)
    console = console or Console()
    with LiveTable(study, wanted, out, console) as live:
        _run_missing(study, wanted, out, only, slots, start or start_worker, live)
    table, comparisons = results.write_results(study, wanted, out)
    result = StudyResult(out, study, table, comparisons)
    _show(result, console)
    if build_report is None:
        return result
    page = build_report(out)
    console.print(f"Report: {page}", soft_wrap=True, highlight=False, markup=False)
    return replace(result, report=page)


def _run_missing(
    study: Study,
    wanted: Sequence[Run],
    out: Path,
    only: Collection[str],
    slots: Sequence[Slot],
    start: Starter,
    live: LiveTable,
) -> None:
    def started(run: Run, slot: Slot) -> subprocess.Popen:
        results.forget_failure(out, run)
        live.started(run, slot)
        return start(out, run, slot)

    def ended(run: Run, status: int) -> None:
        record_end(out, run, status)
        results.write_results(study, wanted, out)
        live.ended(run, elsewhere=status == worker.BUSY)

    missing = [run for run in wanted if results.state(out, run)[0] != results.FINISHED]
    run_all([run for run in missing if not only or run.arm in only], slots, started, ended, live.tick)


def _show(result: StudyResult, console: Console) -> None:
    for table in tables(result.study, result.comparisons):
        show(table, console)
    for row in result.failed:
        console.print(f"{row['label']}/seed-{row['seed']} failed: {row['reason']}", markup=False, soft_wrap=True)


def start_worker(out: Path, run: Run, slot: Slot, probe: Sequence[str] = ()) -> subprocess.Popen:
    """Train a run in a process of its own, which ends when this one does (see `worker`); `probe`: texts to probe on."""
    recipe = results.recipe_file(out, run)
    write_text(_made(recipe.parent) / recipe.name, recipe_text(run.recipe))
    log = results.log_file(out, run)
    with (_made(log.parent) / log.name).open("ab") as output:
        output.write(f"--- {run.name} on {slot.name}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
        output.flush()
        return subprocess.Popen(
            worker.command(recipe, results.run_folder(out, run), probe),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **slot.environment},
            start_new_session=True,
        )


def study_text(study: Study) -> str:
    """The study as YAML, as its folder keeps it."""
    return strict_yaml.text_of(study.model_dump())


def check_only(study: Study, only: Collection[str]) -> None:
    """ValueError that names what is not an arm of the study."""
    for arm in only:
        if arm not in study.arms:
            raise ValueError(f"only: {arm!r} is not an arm of the study{nearest(arm, study.arms)}")


def check_reuse(reuse: Iterable[str | Path]) -> None:
    """FileNotFoundError that names what is not a study folder."""
    for folder in map(Path, reuse):
        if not (folder / "runs").is_dir():
            hint = "" if folder.is_dir() else nearest_path(folder)
            raise FileNotFoundError(f"reuse: {folder} is not a study folder (it has no runs/){hint}")


def copy_finished(out: Path, wanted: Sequence[Run], reuse: Sequence[str | Path]) -> None:
    """Copy the finished runs of other studies whose recipes, names apart, are those of runs that are not there yet."""
    check_reuse(reuse)
    if not reuse:
        return
    found: dict[str, Path] = {}
    for folder in map(Path, reuse):
        for summary in sorted(folder.glob("runs/*/seed-*/summary.json")):
            found.setdefault(same_run(load_recipe(summary.parent / "recipe.yaml")), summary.parent)
    for run in wanted:
        target = results.run_folder(out, run)
        source = found.get(same_run(run.recipe))
        if source is not None and not target.exists():
            draft = _made(target.parent) / f".{target.name}.partial"
            shutil.rmtree(draft, ignore_errors=True)
            shutil.copytree(source, draft, ignore=shutil.ignore_patterns("checkpoint-*"))
            draft.rename(target)


def record_end(out: Path, run: Run, status: int) -> None:
    """Keep the reason of a run that did not finish; one that another process holds is no failure."""
    if status != worker.BUSY and results.state(out, run)[0] != results.FINISHED:
        results.record_failure(out, run, _reason(results.log_file(out, run), status))


def _reason(log: Path, status: int) -> str:
    """The last error line of the last attempt in a log, else its last line."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    attempt = text.rpartition("\n--- ")[2]
    lines = [line.strip() for line in attempt.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if _ERROR_LINE.match(line)), lines[-1] if lines else "no output")
    if status < 0:
        return f"killed by {signal.Signals(-status).name}; last line: {last}"
    return last if status else f"ended without a summary; last line: {last}"


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
