"""Without a data root, tasks are lm-eval's own. Its index of all tasks is replaced by a small one, the hub by files."""

from __future__ import annotations

import json

import pytest
from lm_eval.tasks import TaskManager

from depthroute.evaluation import evaluate_folders, harness
from depthroute.evaluation.local_tasks import write_local_tasks
from depthroute.evaluation.results import RECORD

MHAR = {"scheme": "mhar", "num_heads": 2}


@pytest.fixture
def index(data_root, tmp_path, monkeypatch):
    """The folder of the definitions that lm-eval has."""
    folder = tmp_path / "definitions"
    write_local_tasks(["piqa", "humaneval"], data_root, folder)
    monkeypatch.setattr(harness, "TaskManager", lambda: TaskManager(include_path=folder, include_defaults=False))
    return folder


def test_a_task_by_its_standard_name(index, save, tmp_path):
    out = evaluate_folders([save("model", MHAR)], ["piqa"], out=tmp_path / "out")
    model = json.loads((out / RECORD).read_text())["models"]["model"]
    assert model["settings"]["data"] == "hub"
    assert model["tasks"]["piqa"]["items"] == 2
    assert not (out / "tasks").exists()


def test_an_unknown_task(index, save, tmp_path):
    with pytest.raises(ValueError, match=r"lm-eval has no task 'piqqa'; did you mean 'piqa'\?"):
        evaluate_folders([save("model", MHAR)], ["piqqa"], out=tmp_path / "out")


def test_data_that_can_not_be_had(index, save, tmp_path):
    file = index / "piqa.yaml"
    file.write_text(file.read_text().replace("piqa.validation.jsonl", "elsewhere.jsonl"))
    with pytest.raises(RuntimeError, match=r"the data of piqa can not be had from the hub \(.*--data-root reads local"):
        evaluate_folders([save("model", MHAR)], ["piqa"], out=tmp_path / "out")


def test_code_is_run_only_when_it_is_allowed(index, save, tmp_path):
    with pytest.raises(ValueError, match="humaneval runs code that the model generates"):
        evaluate_folders([save("model", MHAR)], ["humaneval"], out=tmp_path / "out")


def test_the_results_lie_with_the_model_by_default(index, save):
    model = save("model", MHAR)
    assert evaluate_folders([model], ["piqa"]) == model / "evaluation"
