"""Local files behind lm-eval's own definitions: its prompts, over our documents."""

from __future__ import annotations

import pytest
from lm_eval.tasks import TaskManager

from depthroute.evaluation.code_scorer import sandboxed_scoring
from depthroute.evaluation.local_tasks import write_local_tasks

PROMPTS = {
    "lambada_openai": ("He took the key and opened the", " door"),
    "hellaswag": ("Rowing: A boat lies on the shore. Two women", " fly over the trees."),
    "piqa": ("Question: Dry a cup\nAnswer:", " Use a towel."),
    "winogrande": ("The cup fell off the shelf as the cup", " was wet."),
    "arc_easy": ("Question: What is frozen water?\n\nChoose one.\nAnswer:", " steam"),
    "boolq": ("\nQuestion: is ice cold?\nAnswer:", " no"),
    "mmlu_anatomy": (
        "The following are multiple choice questions (with answers) about anatomy.\n\n"
        "How many thumbs?\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer:",
        " A",
    ),
}


def first_request(task):
    task.set_config("num_fewshot", task.get_config("num_fewshot") or 0)
    task.build_all_requests(limit=1)
    return task.instances[0].args


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_are_those_of_lm_eval(name, data_root, tmp_path):
    write_local_tasks([name], data_root, tmp_path / "tasks")
    manager = TaskManager(include_path=tmp_path / "tasks", include_defaults=False)
    assert first_request(manager.load([name])["tasks"][name]) == PROMPTS[name]


def test_generating_tasks_keep_shots_and_filters(data_root, tmp_path, sandbox):
    names = ["gsm8k", "minerva_math_algebra", "humaneval", "mbpp"]
    write_local_tasks(names, data_root, tmp_path / "tasks")
    with sandboxed_scoring():
        tasks = TaskManager(include_path=tmp_path / "tasks", include_defaults=False).load(names)["tasks"]
    prompts = {name: first_request(task)[0] for name, task in tasks.items()}
    assert prompts["gsm8k"].count("Question: ") == 6
    assert prompts["minerva_math_algebra"].count("Problem:") == 5
    assert prompts["humaneval"] == 'def double(x):\n    """ Twice x. """\n'
    assert prompts["mbpp"].count("[BEGIN]") == 4
    assert "adds 11 to its argument" in prompts["mbpp"]


def test_a_group_brings_its_tasks(data_root, tmp_path):
    write_local_tasks(["minerva_math"], data_root, tmp_path / "tasks")
    index = TaskManager(include_path=tmp_path / "tasks", include_defaults=False)
    assert "minerva_math" in index.all_groups
    assert len(index.all_subtasks) == 7


def test_what_is_not_the_standard_task_is_said(data_root, tmp_path):
    said = write_local_tasks(["boolq", "piqa", "hellaswag"], data_root, tmp_path / "tasks")
    assert sorted(said) == ["boolq", "hellaswag"]
    assert "passages are missing" in said["boolq"]


def test_what_is_there_stays(data_root, tmp_path):
    write_local_tasks(["piqa"], data_root, tmp_path / "tasks")
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "tasks").iterdir()}
    write_local_tasks(["piqa"], data_root, tmp_path / "tasks")
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "tasks").iterdir()} == before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hellaswog", "'hellaswog' has no form that is read from local files; did you mean 'hellaswag'"),
        ("gpqa_main_zeroshot", "'gpqa_main_zeroshot' has no form that is read from local files"),
        ("lambada", "'lambada' holds 'lambada_standard', which has no form"),
    ],
)
def test_a_task_without_a_local_form(name, message, data_root, tmp_path):
    with pytest.raises(ValueError, match=message):
        write_local_tasks([name], data_root, tmp_path / "tasks")


def test_missing_data(data_root, tmp_path):
    (data_root / "piqa/valid.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match="the data of piqa are missing"):
        write_local_tasks(["piqa"], data_root, tmp_path / "tasks")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        write_local_tasks(["piqa"], tmp_path / "elsewhere", tmp_path / "tasks")


def test_a_file_in_another_form(data_root, tmp_path):
    (data_root / "mbpp/mbpp.jsonl").write_text('{"text": "no number"}\n')
    with pytest.raises(ValueError, match="not in the form that mbpp is read from"):
        write_local_tasks(["mbpp"], data_root, tmp_path / "tasks")
