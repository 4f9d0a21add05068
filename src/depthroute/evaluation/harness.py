"""Saved models through lm-eval: what was saved, by lm-eval's own tasks, kept task by task, and compared."""

from __future__ import annotations

import difflib
import logging
import os
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
from lm_eval.evaluator import evaluate as lm_evaluate
from lm_eval.tasks import TaskManager

from depthroute.evaluation.card import write_evaluation
from depthroute.evaluation.code_scorer import refuse_other_scorers, sandboxed_scoring
from depthroute.evaluation.local_tasks import write_local_tasks
from depthroute.evaluation.results import RECORD, TABLE, ModelResults, write_json
from depthroute.evaluation.sandbox import check_sandbox
from depthroute.evaluation.saved import SavedModel, check_options, describe_model, find_models, load_model
from depthroute.evaluation.scores import compare_models, evaluation_markdown
from depthroute.files import new_folder, write_text
from depthroute.training.environment import describe_code_and_device

BOOTSTRAPS = 1000  # of lm-eval's own error of a perplexity
_KEPT = ("doc_id", "doc_hash", "prompt_hash", "filter", "metrics", "target", "resps", "filtered_resps", "doc")


def evaluate_folders(
    folders: Sequence[str | Path],
    tasks: Sequence[str],
    *,
    data_root: str | Path | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    dtype: str = "auto",
    allow_code: bool = False,
    out: str | Path | None = None,
) -> Path:
    """Evaluate saved models by lm-eval's tasks, and compare each with the first on the same items.

    Args:
        folders: model folders or run folders (their `final/`), each with its tokenizer.
        tasks: names of lm-eval's tasks, groups and tags.
        data_root: a folder of local files to read the tasks from, see `local_tasks`; from the hub by default.
        limit: only the first items of each task.
        batch_size: of the requests to the model.
        dtype: float32, bfloat16, float16, or "auto" for what was saved.
        allow_code: let tasks run the code that a model generates, each program in a sandbox.
        out: the results folder, see `results`; `evaluation` in the only folder, or runs/A-vs-B, by default.

    A task that is finished in the results folder is not run again. Returns the results folder. The cards of models of
    this project get the table of their scores.
    Raises ValueError for unknown tasks, results of other settings in the folder, models with different items;
    FileNotFoundError for a missing model, tokenizer or file of data; RuntimeError where there is no sandbox for code.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RuntimeError("evaluate runs in one process; start it without torchrun or accelerate")
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; wanted at least 1")
    check_options(batch_size, dtype)
    models = find_models(folders)
    folder = new_folder(_default_folder(folders, models) if out is None else out, "out")
    with _quiet():
        loaded, units, deviations = _load_tasks(tasks, data_root, folder / "tasks", allow_code)
        record: dict[str, Any] = {"tasks": list(tasks), "models": {}}
        items = {}
        for model in models:
            results = ModelResults(folder / model.name, _settings(model, limit, batch_size, dtype, data_root))
            run_tasks(model, loaded["tasks"], results, limit, batch_size, dtype, allow_code, deviations)
            record["models"][model.name] = _model_record(model, loaded, results)
            items[model.name] = {unit: {task: list(results.items(task)) for task in units[unit]} for unit in units}
    (first, found), *others = items.items()
    comparisons = [compare_models((first, found), other) for other in others]
    record["comparisons"] = [comparison.to_dict() for comparison in comparisons]
    write_json(folder / RECORD, record)
    write_text(folder / TABLE, evaluation_markdown(record, comparisons))
    for model in models:
        write_evaluation(model.folder, record["models"][model.name])
    return folder


def run_tasks(
    model: SavedModel,
    tasks: Mapping[str, Any],
    results: ModelResults,
    limit: int | None,
    batch_size: int,
    dtype: str,
    allow_code: bool,
    deviations: Mapping[str, str],
) -> None:
    """Run what is not finished, one task after the other; each is saved as soon as it is done."""
    unfinished = [name for name in tasks if not results.is_finished(name)]
    if not unfinished:
        return
    lm = load_model(model, batch_size, dtype)
    environment = describe_code_and_device()
    for number, name in enumerate(unfinished, 1):
        print(f"{model.name}: {name} ({number} of {len(unfinished)})", file=sys.stderr, flush=True)
        found: Any = lm_evaluate(
            lm,
            {"tasks": {name: _prepared(tasks[name])}, "groups": {}, "group_map": {}},
            limit=limit,
            bootstrap_iters=BOOTSTRAPS,
            confirm_run_unsafe_code=allow_code,
        )
        samples = found["samples"][name]
        scores = {
            "metrics": found["results"][name],
            "items": found["n-samples"][name]["effective"],
            "items_of_the_task": found["n-samples"][name]["original"],
            "shots": found["n-shot"][name],
            "version": found["versions"][name],
            "dtype": str(lm.model.dtype).removeprefix("torch."),
            "device": lm.device.type,
            "environment": environment,
            "deviation": deviations.get(name),
        }
        results.save(name, scores, [{key: item[key] for key in (*_KEPT, *item["metrics"])} for item in samples])


def _prepared(task: Any) -> Any:
    """As lm-eval's command line has a task before it runs: seeded, without shots where the task names none."""
    if task.get_config("num_fewshot") is None:
        task.set_config("num_fewshot", 0)
    task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    _seed()
    return task


def _seed() -> None:
    """The seeds of lm-eval's command line."""
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    torch.manual_seed(DEFAULT_OTHER_SEED)


def _load_tasks(
    names: Sequence[str], data_root: str | Path | None, folder: Path, allow_code: bool
) -> tuple[dict[str, dict[str, Any]], dict[str, list[str]], dict[str, str]]:
    """lm-eval's tasks and groups; the units of comparison: a group as a whole, or a task; deviations by task."""
    if not names:
        raise ValueError("tasks: there are none; wanted at least one")
    deviations: dict[str, str] = {}
    if data_root is not None:
        deviations = write_local_tasks(names, Path(data_root).expanduser(), folder)
        manager = TaskManager(include_path=folder, include_defaults=False)
    else:
        manager = TaskManager()
    for name in names:
        if name not in manager.task_index:
            close = difflib.get_close_matches(name, manager.all_tasks, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"tasks: lm-eval has no task {name!r}{hint} (`lm-eval ls tasks` lists them)")
    _check_code(list(_entries(names, manager)), allow_code)
    loaded: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}}
    units: dict[str, list[str]] = {}
    with sandboxed_scoring():
        for name in names:
            found: Any = _load(name, manager, data_root)
            loaded["tasks"].update(found["tasks"])
            loaded["groups"].update(found["groups"])
            is_group = name in found["groups"]
            units.update({name: list(found["tasks"])} if is_group else {task: [task] for task in found["tasks"]})
    refuse_other_scorers(loaded["tasks"].values())
    return loaded, units, deviations


def _load(name: str, manager: TaskManager, data_root: str | Path | None) -> Any:
    _seed()  # GPQA draws the order of its answers here
    try:
        return manager.load([name])
    except (OSError, ValueError) as error:
        if data_root is not None:
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RuntimeError(
            f"tasks: the data of {name} can not be had from the hub ({reason}); --data-root reads local files"
        ) from error


def _entries(names: Iterable[str], manager: TaskManager) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every task behind some names, with its configuration; nothing is loaded yet."""
    for name in names:
        entry = manager.task_index.get(name)
        if entry is None:
            continue
        if entry.cfg is None:
            yield from _entries(sorted(entry.tags), manager)
        elif "group" in entry.cfg:
            children = entry.cfg.get("task") or []
            yield from _entries([child if isinstance(child, str) else child.get("task") for child in children], manager)
        else:
            yield name, entry.cfg


def _check_code(entries: Sequence[tuple[str, Mapping[str, Any]]], allow_code: bool) -> None:
    unsafe = [name for name, config in entries if config.get("unsafe_code")]
    if unsafe and not allow_code:
        raise ValueError(f"tasks: {unsafe[0]} runs code that the model generates; --allow-code runs it in a sandbox")
    if unsafe:
        check_sandbox()


def _settings(
    model: SavedModel, limit: int | None, batch_size: int, dtype: str, data_root: str | Path | None
) -> dict[str, Any]:
    """What results hold for: results of other settings are not mixed with these."""
    return {
        **describe_model(model),
        "limit": limit,
        "batch_size": batch_size,
        "dtype": dtype,
        "data": "hub" if data_root is None else "local",
        "lm_eval": version("lm_eval"),
    }


def _model_record(model: SavedModel, loaded: Mapping[str, Mapping[str, Any]], results: ModelResults) -> dict[str, Any]:
    tasks = {name: results.scores(name) for name in loaded["tasks"]}
    metrics = {name: found["metrics"] for name, found in tasks.items()}
    groups = {}
    for name, group in loaded["groups"].items():
        found = group.aggregate(metrics)
        groups[name] = {"metrics": found, "items": found.get("sample_len", 0)}
    one = next(iter(tasks.values()))
    return {
        "settings": results.settings,
        "dtype": one["dtype"],
        "device": one["device"],
        "tasks": tasks,
        "groups": groups,
    }


def _default_folder(folders: Sequence[str | Path], models: Sequence[SavedModel]) -> Path:
    if len(models) == 1:
        return Path(folders[0]).expanduser() / "evaluation"
    return Path("runs") / "-vs-".join(model.name for model in models)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without lm-eval's notes on its own definitions and the bars of `datasets`; what it prints is no result."""
    logger = logging.getLogger("lm_eval")
    level, bars = logger.level, not datasets.are_progress_bars_disabled()
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        logger.setLevel(level)
        if bars:
            datasets.enable_progress_bars()
