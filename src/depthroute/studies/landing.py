"""Studies whose runs land one by one: each trains, is probed, leaves its model behind and becomes one small archive.

For machines that are there for minutes and keep nothing: whatever has ended by then is whole, and unpacked side by side
the archives are a study folder without models.
"""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from depthroute.data import prepare
from depthroute.errors import nearest
from depthroute.files import write_text
from depthroute.probing.folder import RECORD as PROBE
from depthroute.studies import results
from depthroute.studies.grid import record_end, start_worker, study_text
from depthroute.studies.scheduling import Slot, free_slots
from depthroute.studies.study import Run, load_study, runs
from depthroute.studies.turns import run_in_turns
from depthroute.training.callbacks import read_metrics
from depthroute.training.trainer import cache_folder

ARCHIVES = "archives"
_MODELS = ("checkpoint-*", "final", "final-ema", ".*.partial")


def land_study(
    source: str | Path | Mapping[str, Any],
    out: str | Path,
    names: Sequence[str],
    *,
    overrides: Iterable[str] = (),
    probe: Sequence[str] = (),
    ahead: int = 1,
    workers: int | None = None,
    minutes: float = float("inf"),
    least_minutes: float = 0.0,
) -> list[str]:
    """Run some runs of a study (such as "mhar/seed-0") in turns, in this order; returns those that are not there yet.

    Each is probed on the texts `probe` where its scheme reads over depth, and its small files and its log become
    `out`/archives/<label>_seed-<s>.tar.xz, also where it has failed. A run that was cut or has failed, or whose probe
    has, goes on from where it was the next time. `ahead`: how many compile while one trains, on each of the `workers`
    devices. `minutes`, `least_minutes`: as `seconds` and `least` of `run_in_turns`.
    Raises ValueError for a name that the study does not have, for numbers out of range, and what `load_study` raises.
    """
    began, out = time.monotonic(), Path(out)
    if ahead < 0:
        raise ValueError(f"ahead: got {ahead}, wants at least 0")
    if not minutes > 0:
        raise ValueError(f"minutes: got {minutes:g}, wants a number > 0")
    if not least_minutes >= 0:
        raise ValueError(f"least_minutes: got {least_minutes:g}, wants at least 0")
    study = load_study(source, overrides)
    by_name = {run.name: run for run in runs(study)}
    for name in names:
        if name not in by_name:
            raise ValueError(f"names: {name!r} is not a run of {study.name}{nearest(name, by_name)}")
    wanted = [by_name[name] for name in names]
    results.check_place(out, wanted)
    say = partial(_say, began)
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "study.yaml", study_text(study))
    missing = [run for run in wanted if not _landed(out, run)]
    _tokenise(missing, say)

    def start(run: Run, slot: Slot) -> Any:
        results.forget_failure(out, run)
        archive_file(out, run).unlink(missing_ok=True)
        say(f"{run.name} started on {slot.name}")
        return start_worker(out, run, slot, probe)

    def ended(run: Run, status: int) -> None:
        record_end(out, run, status)
        if status == 0:
            for model in _models(results.run_folder(out, run)):
                shutil.rmtree(model)
        _pack(out, run)
        say(_outcome(out, run, status))

    left = run_in_turns(
        missing,
        free_slots(workers),
        start,
        lambda run: any(line["kind"] == "train" for line in _metrics(out, run)),
        lambda run: results.state(out, run)[0] == results.FINISHED,
        ended,
        ahead=ahead,
        seconds=60 * minutes - (time.monotonic() - began),
        least=60 * least_minutes,
    )
    for run in left:
        say(f"{run.name} not done: {results.state(out, run)[0]}")
    return [run.name for run in wanted if not _landed(out, run)]


def archive_file(out: Path, run: Run) -> Path:
    """The archive that a run becomes."""
    return out / ARCHIVES / f"{run.label}_seed-{run.seed}.tar.xz"


def in_order(source: str | Path, first: Sequence[str], landed: Path | None = None) -> list[str]:
    """The names of a study's runs: those of the arms `first`, seed by seed, then the others; without what has `landed`.

    `landed`: a study folder whose finished runs are left out.
    """
    found = sorted(runs(load_study(source)), key=lambda run: (run.arm not in first, run.seed))
    return [run.name for run in found if landed is None or results.state(landed, run)[0] != results.FINISHED]


def _landed(out: Path, run: Run) -> bool:
    """Whether a run has come to its end: one that was cut while it was probed is finished, and has no archive; where
    the probe failed it still has its model."""
    finished = results.state(out, run)[0] == results.FINISHED
    return finished and archive_file(out, run).is_file() and not _models(results.run_folder(out, run))


def _tokenise(wanted: Iterable[Run], say: Any) -> None:
    """Make the token files here, on all cores: each run's process has its tokenizer on one."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    for data in {str(run.recipe.data_with_tokenizer): run.recipe.data_with_tokenizer for run in wanted}.values():
        splits = prepare(data, cache_folder())
        tokens = f"{splits.train.num_tokens:,} tokens to train on, {splits.validation.num_tokens:,} held out"
        say(f"{tokens}, {splits.dropped_documents} documents dropped")


def _models(folder: Path) -> list[Path]:
    return [path for pattern in _MODELS for path in folder.glob(pattern)]


def _pack(out: Path, run: Run) -> None:
    """The small files of a run and its log, as they lie in a study folder; the archive is there whole, or as it was."""
    path = archive_file(out, run)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.partial")
    files = [path for path in sorted(results.run_folder(out, run).iterdir()) if path.is_file()]
    with tarfile.open(draft, "w:xz") as archive:
        for file in [*files, results.log_file(out, run)]:
            content = file.read_bytes().replace(str(Path.cwd()).encode(), b".")  # a log may tell where things lay
            entry = tarfile.TarInfo(file.relative_to(out).as_posix())
            entry.size, entry.mtime = len(content), int(file.stat().st_mtime)
            archive.addfile(entry, BytesIO(content))
    draft.replace(path)


def _metrics(out: Path, run: Run) -> list[dict[str, Any]]:
    return read_metrics(results.run_folder(out, run) / "metrics.jsonl")


def _outcome(out: Path, run: Run, status: int) -> str:
    state, reason = results.state(out, run)
    if state != results.FINISHED:
        return f"{run.name} {state}: {reason}"
    (row,) = results.rows(out, [run])
    memory = f"{row['peak_memory_bytes'] / 1e9:.1f} GB"
    probed = "probed" if (results.run_folder(out, run) / PROBE).is_file() else "not probed"
    odd = f", but its process ended with {status}: see its log" if status else ""
    return (
        f"{run.name} finished: held-out loss {row['final_loss']:.4f}, {row['tokens_per_second']:,.0f} tokens/s, "
        f"{memory}, {probed}{odd}"
    )


def _say(began: float, text: str) -> None:
    print(f"{time.monotonic() - began:5.0f} s  {text}", file=sys.stderr, flush=True)
