"""Studies whose runs are no training, but a process that writes the files that a run folder has."""

import io
import json
import subprocess
import sys

import pytest
from rich.console import Console

from depthroute.studies.grid import run_study
from depthroute.training.recipe import recipe_text

STUDY = {
    "name": "example",
    "recipe": {"optimizer": {"warmup_steps": 2}, "training": {"steps": 10}},
    "arms": {
        "additive": {"residual": {"scheme": "additive"}},
        "mhar-h1": {"residual": {"scheme": "mhar", "num_heads": 1}},
        "mhar-h2": {"residual": {"scheme": "mhar", "num_heads": 2}},
    },
    "baseline": "additive",
    "seeds": [0, 1],
}

# Waits a moment, prints what it is told to, writes the files of a finished run if it has any, and ends.
_PROGRAM = """
import json, os, pathlib, signal, sys
told = json.loads(sys.argv[1])
print("some output", flush=True)
print(told["output"], flush=True)
for path, text in told["files"].items():
    pathlib.Path(path).write_text(text)
if told["status"] < 0:
    os.kill(os.getpid(), -told["status"])
sys.exit(told["status"])
"""


class FakeRuns:
    """Starts fake runs; `losses` says what each reaches, `fails` (run name -> status, output) which of them fail."""

    def __init__(self):
        self.started = []
        self.fails = {}
        self.losses = {}
        self.console = Console(file=io.StringIO(), width=200)

    def __call__(self, out, run, slot):
        self.started.append(run.name)
        folder, log = out / "runs" / run.name, out / "logs" / f"{run.name}.log"
        folder.mkdir(parents=True, exist_ok=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        (folder / "recipe.yaml").write_text(recipe_text(run.recipe))
        status, output = self.fails.get(run.name, (0, ""))
        files = {} if status else {str(folder / name): text for name, text in self._files(run).items()}
        told = json.dumps({"status": status, "output": output, "files": files})
        with log.open("ab") as file:
            return subprocess.Popen(
                [sys.executable, "-S", "-c", _PROGRAM, told], stdout=file, stderr=file, start_new_session=True
            )

    def _files(self, run):
        loss = self.losses.get(run.name, 5.0)
        steps = run.recipe.training.steps
        lines = [
            {
                "kind": "evaluation",
                "step": s,
                "tokens": s * 100,
                "loss": loss + 1 - s / steps,
                "num_tokens": 9,
                "seconds": 1,
            }
            for s in (steps // 2, steps)
        ]
        summary = {
            "scheme": run.recipe.residual["scheme"],
            "parameters": 100,
            "residual_parameters": 0 if run.arm == "additive" else 10,
            "steps": steps,
            "tokens": steps * 100,
            "final_loss": loss,
            "tail_loss": loss,
            "tail_evaluations": 1,
            "unigram_entropy": 6.5,
            "tokens_per_second": 50.0 if run.arm == "additive" else 25.0,
            "peak_memory_bytes": 7,
            "seconds_to_first_step": 1.0,
            "seconds": 2.0,
        }
        return {"metrics.jsonl": "".join(json.dumps(x) + "\n" for x in lines), "summary.json": json.dumps(summary)}

    def study(self, out, study=STUDY, **options):
        return run_study(study, out, 2, report=False, console=self.console, start=self, **options)

    @property
    def output(self):
        return self.console.file.getvalue()


@pytest.fixture
def fake():
    return FakeRuns()
