"""lm-eval's own task definitions over local files: prompts, filters and metrics are its own, the data come from here.

`write_local_tasks` turns the files under a data root into a folder for lm-eval's `include_path`: for each task its
documents as JSON lines, and a YAML file that includes lm-eval's definition and names those documents as its data set.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lm_eval
import yaml
from lm_eval.tasks import TaskManager

from depthroute.errors import nearest, nearest_path
from depthroute.evaluation import readers
from depthroute.evaluation.readers import Document

Reader = Callable[[Path], Iterable[Document]]

SPLITS = ("training_split", "validation_split", "test_split")


@dataclass(frozen=True)
class LocalTask:
    """The local files behind a task of lm-eval.

    `splits`: split name -> (file below the data root, its reader). `deviation`: what is not the standard task, if
    anything is not.
    """

    splits: Mapping[str, tuple[str, Reader]]
    deviation: str | None = None


WIKITEXT_LAYOUT = "the local copy has no blank lines; they are put back (7 of 1,467 not where they were)"
HELLASWAG_TEXT = "from a text copy: contexts are cleaned already, their unfinished last sentence is cut off again"
ARC_INSTRUCTIONS = "questions and choices are taken out of a copy that was rewritten as instructions"
BOOLQ_WITHOUT_PASSAGES = "the passages are missing: not the standard task, scores can not be compared with its scores"
MBPP_COPY = "the file is another revision than the authors' present one"

_FOLDERS = "arc benchmarks gsm8k hellaswag humaneval lambada mbpp minerva_math mmlu/default piqa super_glue/boolq"
_FOLDERS += " wikitext winogrande"
_MMLU, _MATH = "mmlu.tar.xz", "math/test.jsonl.xz"
_ARC, _BOOLQ = "arc/ARC-{}_test.llm-adapters.json", "boolq/boolq_val_questions_only.llm-adapters.json"

_TASKS: dict[str, LocalTask] = {
    "arc_challenge": LocalTask({"test": (_ARC.format("Challenge"), readers.arc)}, ARC_INSTRUCTIONS),
    "arc_easy": LocalTask({"test": (_ARC.format("Easy"), readers.arc)}, ARC_INSTRUCTIONS),
    "boolq": LocalTask({"validation": (_BOOLQ, readers.boolq)}, BOOLQ_WITHOUT_PASSAGES),
    "gsm8k": LocalTask(
        {
            "train": ("gsm8k/train.jsonl.xz", readers.json_lines),
            "test": ("gsm8k/test.jsonl", readers.json_lines),
        }
    ),
    "hellaswag": LocalTask({"validation": ("hellaswag/hellaswag_val_full.txt.bz2", readers.hellaswag)}, HELLASWAG_TEXT),
    "humaneval": LocalTask({"test": ("humaneval/HumanEval.jsonl.gz", readers.json_lines)}),
    "lambada_openai": LocalTask({"test": ("lambada/lambada_test.jsonl", readers.json_lines)}),
    "mbpp": LocalTask({"test": ("mbpp/mbpp.jsonl", readers.mbpp)}, MBPP_COPY),
    **{
        f"minerva_math_{subject}": LocalTask({"test": (_MATH, partial(readers.math, subject=subject))})
        for subject in readers.MATH_SUBJECTS
    },
    "piqa": LocalTask({"validation": ("piqa/valid.jsonl", readers.piqa)}),
    "wikitext": LocalTask({"test": ("wikitext2/wiki.test.raw", readers.wikitext)}, WIKITEXT_LAYOUT),
    "winogrande": LocalTask({"validation": ("winogrande/dev.jsonl", readers.json_lines)}),
}
_NAMES = [*(name for name in _TASKS if not name.startswith("minerva_math_")), "minerva_math", "mmlu"]


def local_task(name: str) -> LocalTask | None:
    """Where the data of a task of lm-eval lie below a data root; None for a task without a local form."""
    if name.startswith("mmlu_"):
        subject = name.removeprefix("mmlu_")
        readers_of = {split: partial(readers.mmlu, subject=subject, split=split) for split in ("dev", "test")}
        return LocalTask({split: (_MMLU, reader) for split, reader in readers_of.items()})
    return _TASKS.get(name)


def write_local_tasks(names: Iterable[str], data_root: Path, folder: Path) -> dict[str, str]:
    """Make `folder` an `include_path` of lm-eval for `names` (its tasks, groups and tags) over local files.

    Returns the deviations from the standard tasks, by task. What is there already with the same content stays.
    Raises ValueError for a name that has no local form, and for a file that is not in the form that is read;
    FileNotFoundError for a data root or a file that is missing.
    """
    if not data_root.is_dir():
        raise FileNotFoundError(f"data_root: there is no folder {data_root}{nearest_path(data_root)}")
    index = _definitions()
    folder.mkdir(parents=True, exist_ok=True)
    deviations = {}
    for name in names:
        for member in _members(name, index):
            definition = index[member].yaml_path
            task = local_task(member)
            if "group" in index[member].cfg:
                _write_yaml(folder / f"{member}.group.yaml", {"include": str(definition)})
            elif task is None:
                raise ValueError(_no_local_form(name, member))
            else:
                config = {"include": str(definition), "task": member, **_data(member, task, data_root, folder)}
                unread = [key for key in SPLITS if index[member].cfg.get(key) not in (None, *task.splits)]
                _write_yaml(folder / f"{member}.yaml", {**config, **dict.fromkeys(unread)})
                deviations.update({member: task.deviation} if task.deviation else {})
    return deviations


def _definitions() -> Any:
    """lm-eval's index of its own definitions, where local data can stand behind them."""
    root = Path(lm_eval.__file__).parent / "tasks"
    return TaskManager(include_path=[root / name for name in _FOLDERS.split()], include_defaults=False).task_index


def _members(name: str, index: Any) -> Iterator[str]:
    """The task itself; the members of a tag; a group, its groups and their tasks."""
    if name not in index:
        raise ValueError(_no_local_form(name, name))
    entry = index[name]
    if entry.cfg is None:
        for task in sorted(entry.tags):
            yield from _members(task, index)
    else:
        yield name
        if "group" in entry.cfg:
            for child in entry.cfg["task"]:
                yield from _members(child if isinstance(child, str) else child["task"], index)


def _no_local_form(name: str, member: str) -> str:
    whole = f"{name!r}" if name == member else f"{name!r} holds {member!r}, which"
    return f"tasks: {whole} has no form that is read from local files{nearest(name, _NAMES)}"


def _data(name: str, task: LocalTask, data_root: Path, folder: Path) -> dict[str, Any]:
    """Write the documents of a task, and say where they are in the words of lm-eval's configuration."""
    files = {}
    for split, (file, reader) in task.splits.items():
        source, target = data_root / file, (folder / f"{name}.{split}.jsonl").resolve()
        if not source.is_file():
            raise FileNotFoundError(f"data_root: the data of {name} are missing, there is no {source}")
        try:
            lines = [json.dumps(document, ensure_ascii=False) + "\n" for document in reader(source)]
        except (KeyError, EOFError, UnicodeDecodeError) as error:
            raise ValueError(f"{source}: not in the form that {name} is read from ({error!r})") from None
        _write_if_other(target, "".join(lines))
        files[split] = str(target)
    # In a cache of its own, so that all of it lies in one folder.
    kwargs = {"data_files": files, "cache_dir": str((folder / "cache").resolve())}
    return {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": kwargs}


def _write_yaml(path: Path, content: dict[str, Any]) -> None:
    _write_if_other(path, yaml.safe_dump(content, sort_keys=False))


def _write_if_other(path: Path, text: str) -> None:
    """The file is there whole, or as it was; one that is the same keeps its time, by which `datasets` knows it."""
    data = text.encode("utf-8")
    if path.is_file() and path.read_bytes() == data:
        return
    draft = path.with_name(f".{path.name}.partial")
    draft.write_bytes(data)
    os.replace(draft, path)
