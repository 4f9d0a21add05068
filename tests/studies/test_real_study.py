"""A study of real training runs, killed in the middle and started again."""

import csv
import io
import json
import os
import random
import subprocess
import sys
import time

import psutil
import pytest
from rich.console import Console

from depthroute.studies.grid import run_study
from depthroute.studies.quickstart import sample_from_best
from depthroute.studies.results import TIMING_COLUMNS, run_folder, write_results
from depthroute.studies.study import load_study, runs
from depthroute.training import train
from support.small_runs import write_corpus

STEPS = 8
_STUDY_PROGRAM = """
import json, sys
from depthroute.studies.grid import run_study
run_study(json.loads(sys.argv[1]), sys.argv[2], 2, report=False)
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    corpus = write_corpus(tmp_path_factory.mktemp("corpus"))
    decoder = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return {
        "name": "real",
        "recipe": {
            "model": {"preset": "tiny", "decoder": {**decoder, "num_key_value_heads": 2, "head_dim": 8}},
            "data": {
                "train": str(corpus),
                "held_out_fraction": 0.2,
                "sequence_length": 16,
                "max_validation_tokens": 500,
            },
            "optimizer": {"warmup_steps": 3},
            "training": {
                "steps": STEPS,
                "batch_size": 8,
                "evaluate_every": 2,
                "log_every": 1,
                "tail": 2,
                "num_threads": 1,
            },
        },
        "arms": {
            "additive": {"residual": {"scheme": "additive"}},
            "mhar-h1": {"residual": {"scheme": "mhar", "num_heads": 1}},
            "mhar-kv": {"residual": {"scheme": "mhar", "num_heads": "kv"}},
        },
        "baseline": "additive",
        "seeds": [0, 1],
    }


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory):
    os.environ["DEPTHROUTE_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    del os.environ["DEPTHROUTE_CACHE"]


@pytest.fixture(scope="module")
def killed(study, tmp_path_factory):
    """The folder of a study that was killed at a random place and then finished, and what was seen on the way."""
    out = tmp_path_factory.mktemp("killed")
    process = subprocess.Popen([sys.executable, "-c", _STUDY_PROGRAM, json.dumps(study), str(out)])
    records = random.Random().randint(1, 60)  # of the 72 lines that the six runs write
    deadline = time.monotonic() + 120
    while _records(out) < records and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(workers, timeout=20)
    finished_before = {path.parent: path.stat().st_mtime_ns for path in out.glob("runs/*/*/summary.json")}
    console = Console(file=io.StringIO())
    result = run_study(study, out, 2, report=False, console=console)
    return out, result, {"records": records, "workers": len(workers), "alive": alive, "finished": finished_before}


def _records(out):
    return sum(len(path.read_bytes().splitlines()) for path in out.glob("runs/*/*/metrics.jsonl"))


def _without_timing(out):
    with (out / "results.csv").open(newline="") as file:
        return [{key: value for key, value in row.items() if key not in TIMING_COLUMNS} for row in csv.DictReader(file)]


@pytest.mark.slow
def test_a_killed_study_leaves_no_worker_behind(killed):
    _, _, seen = killed
    assert seen["workers"] >= 1
    assert seen["alive"] == []


@pytest.mark.slow
def test_a_study_killed_at_random_gives_the_csv_of_one_that_was_not(killed, study, tmp_path):
    out, result, seen = killed
    assert result.finished
    whole = load_study(study)
    for run in runs(whole):
        train(run.recipe, run_folder(tmp_path, run))
    write_results(whole, runs(whole), tmp_path)
    assert _without_timing(out) == _without_timing(tmp_path), f"killed after {seen['records']} records"


@pytest.mark.slow
def test_what_was_finished_before_the_kill_was_not_run_again(killed):
    _, _, seen = killed
    assert {folder: (folder / "summary.json").stat().st_mtime_ns for folder in seen["finished"]} == seen["finished"]


@pytest.mark.slow
def test_the_best_arm_of_a_study_goes_on_from_a_prompt(killed):
    _, result, _ = killed
    sample = sample_from_best(result, "the green house")
    assert sample["arm"] == min(result.comparisons["arms"], key=lambda arm: arm["loss"]["mean"])["label"]
    assert sample["prompt"] == "the green house"
    assert sample["text"]
    assert sample == sample_from_best(result, "the green house")
