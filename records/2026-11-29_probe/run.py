"""Train the arms of study.yaml into the folder OUT, probe each model on held-out books, keep the probes in results/.

python run.py OUT
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from depthroute.probing import probe_folder
from depthroute.studies import run_study
from depthroute.studies.results import run_folder
from depthroute.studies.study import load_study, runs

HERE = Path(__file__).parent


def main(out: Path) -> None:
    run_study(HERE / "study.yaml", out)
    for run in runs(load_study(HERE / "study.yaml")):
        folder, kept = run_folder(out, run), HERE / "results" / run.arm / f"seed-{run.seed}"
        kept.mkdir(parents=True, exist_ok=True)
        probe_folder(folder, out=kept / "probe.json")
        for name in ("metrics.jsonl", "summary.json", "environment.json", "recipe.yaml"):
            shutil.copy(folder / name, kept / name)
        print(f"{run.arm}, seed {run.seed}: probed", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
