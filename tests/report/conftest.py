"""Run and study folders made up for tests: curves of the usual shape with known last values."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from depthroute.data import load_tokenizer
from depthroute.evaluation.results import ModelResults, write_json
from depthroute.evaluation.scores import compare_models
from depthroute.probing import probe_folder
from support.browser import chromium  # noqa: F401  (a fixture)
from support.models import move_off_init, routed

ENTROPY = 6.9213
BATCH_TOKENS = 65536
EVERY = 100


def read_weights(layers: int, heads: int, seed: int = 0) -> list[dict[str, Any]]:
    """Weights of a full mhar model: mostly the newest source and the embedding, differently in each head."""
    draw = random.Random(seed)
    names = ["embedding", *(f"{'mlp' if i % 2 else 'attention'} {i // 2}" for i in range(2 * layers))]
    sites = []
    for site in range(1, 2 * layers + 1):
        rows = []
        for head in range(heads):
            raw = [math.exp(draw.gauss(0, 0.8)) for _ in range(site + 1)]
            raw[-1] += 0.35 * (site + 1) / (head + 1)
            raw[0] += 0.1 * (site + 1) * (head + 1) / heads
            rows.append([value / sum(raw) for value in raw])
        name = "final" if site == 2 * layers else names[site + 1]
        sites.append({"site": site, "name": name, "sources": names[: site + 1], "weights": rows, "tokens": 65536})
    return sites


def readings(gates: int, step: int) -> dict[str, dict[str, float]]:
    """Gates that open and queries that grow with the steps, each read at its own pace."""
    names = [f"model.residual.reads.{i}" for i in range(gates)]
    return {
        "gates": {f"{name}.gate": step * (i - 1) * 1e-5 for i, name in enumerate(names)},
        "query_norms": {f"{name}.query": step * (i + 1) * 1e-4 for i, name in enumerate(names)},
    }


def write_run(
    folder: Path,
    *,
    loss: float = 3.3,
    seed: int = 0,
    steps: int = 2000,
    finished: bool = True,
    name: str = "run",
    residual: dict[str, Any] | None = None,
    weights: list[dict[str, Any]] | None = None,
    recipe: dict[str, Any] | None = None,
    environment: dict[str, Any] | None = None,
    summary: dict[str, Any] | None = None,
    gates: int = 0,
    sequences: int = 0,
) -> Path:
    """A run folder whose tail loss is `loss`.

    `gates`: reads whose gates and queries are recorded; `sequences`: held-out sequences whose losses are, which have
    an average of the weights too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(f"{name} {seed}")
    settings = {
        "name": name,
        "seed": seed,
        "model": {"preset": "tiny", "decoder": {}},
        "residual": residual or {"scheme": "additive"},
        "data": {"train": "embedded", "validation": None, "sequence_length": 256},
        "optimizer": {
            "learning_rate": 1e-3,
            "beta1": 0.9,
            "beta2": 0.95,
            "weight_decay": 0.1,
            "schedule": "cosine",
            "warmup_steps": 100,
        },
        "training": {"steps": 2000, "batch_size": 32, "precision": "fp32"},
    } | (recipe or {})
    (folder / "recipe.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    device = {"commit": "0123abc", "device": "cpu", "versions": {"torch": "2.13.0"}} | (environment or {})
    (folder / "environment.json").write_text(json.dumps(device))
    lines, alone = [], []
    for step in range(0, steps + 1, 10):
        shared = {"step": step, "tokens": step * BATCH_TOKENS, "seconds": step * 0.1}
        value = loss + 4.2 * math.exp(-step / 150) + 1.1 * math.exp(-step / 700) - 1.1 * math.exp(-2000 / 700)
        if step:
            train = {"lr": 1e-3, "grad_norm": 0.7, "tokens_per_second": 8e5, "peak_memory_bytes": 4.1e9}
            lines.append({"kind": "train", "loss": value + draw.gauss(0, 0.03), **shared, **train})
        if step % EVERY == 0:
            evaluated = {"kind": "evaluation", "loss": value + draw.gauss(0, 0.002), "num_tokens": 10**6, **shared}
            lines.append(evaluated | ({"stderr": 0.03, "ema_loss": value + 0.01} if sequences else {}))
            if gates:
                lines.append({"kind": "residual", "step": step, "tokens": shared["tokens"], **readings(gates, step)})
            if sequences:
                own = [value + 0.5 * math.sin(7 * i) + 0.01 * draw.gauss(0, 1) for i in range(sequences)]
                alone.append({"step": step, "losses": own, "ema_losses": [one + 0.01 for one in own]})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if alone:
        (folder / "held_out.jsonl").write_text("".join(json.dumps(line) + "\n" for line in alone))
    if weights is not None:
        (folder / "read_weights.json").write_text(json.dumps(weights))
    if finished:
        reached = {
            "name": name,
            "seed": seed,
            "scheme": settings["residual"]["scheme"],
            "parameters": 3_276_800,
            "residual_parameters": 0 if weights is None else 12_288,
            "steps": steps,
            "tokens": steps * BATCH_TOKENS,
            "final_loss": loss - 0.001,
            "tail_loss": loss,
            "tail_evaluations": 11,
            "unigram_entropy": ENTROPY,
            "tokens_per_second": 8.05e5 if weights is None else 6.3e5 + 1000 * seed,
            "peak_memory_bytes": 4.2e9,
            "seconds_to_first_step": 3.0,
            "seconds": 201.0,
        } | ({"final_stderr": 0.03, "final_ema_loss": loss + 0.009} if sequences else {})
        reached |= summary or {}
        (folder / "summary.json").write_text(json.dumps(reached))
    return folder


def write_study(
    folder: Path,
    losses: dict[str, dict[int, float]],
    *,
    baseline: str | None = "additive",
    seeds: list[int] | None = None,
    layers: int = 4,
    heads: int = 2,
) -> Path:
    """A study folder: `losses` is arm -> seed -> tail loss; every arm but `additive` and `hyper*` has read weights."""
    seeds = seeds if seeds is not None else sorted({seed for by_seed in losses.values() for seed in by_seed})
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"name": "synthetic study", "arms": {arm: {} for arm in losses}, "seeds": seeds, "baseline": baseline}
    (folder / "study.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    for arm, by_seed in losses.items():
        reads = not arm.startswith(("additive", "hyper"))
        for seed, value in by_seed.items():
            write_run(
                folder / "runs" / arm / f"seed-{seed}",
                loss=value,
                seed=seed,
                name=arm,
                residual={"scheme": "mhar", "num_heads": heads} if reads else {"scheme": arm},
                weights=read_weights(layers, heads, seed) if reads else None,
            )
    return folder


@pytest.fixture(scope="session")
def make_run() -> Callable[..., Path]:
    return write_run


@pytest.fixture(scope="session")
def make_study() -> Callable[..., Path]:
    return write_study


@pytest.fixture(scope="session")
def make_read_weights() -> Callable[..., list[dict[str, Any]]]:
    return read_weights


@pytest.fixture(scope="session")
def probed(tmp_path_factory) -> dict[int, Path]:
    """Number of route heads -> the folder of a small model that `depthroute probe` has looked at."""
    folders = {}
    for heads in (1, 2):
        folder = folders[heads] = tmp_path_factory.mktemp("probed") / f"small-h{heads}"
        model = routed({"scheme": "mhar", "num_heads": heads}, num_hidden_layers=2, vocab_size=2048)
        move_off_init(model, std=0.2).save_pretrained(folder)
        load_tokenizer("embedded").save_pretrained(folder)
        probe_folder(folder, tokens=256, draws=2)
    return folders


TASKS = {"hellaswag": ("acc_norm", 300, 0.40), "piqa": ("acc", 200, 0.62), "wikitext": ("word_perplexity", 40, 3.5)}


def write_evaluation(folder: Path, gains: dict[str, float], *, limit: int | None = None) -> Path:
    """A results folder of `depthroute evaluate`; `gains` is model -> how much better than the base its scores are."""
    items = {name: {task: {task: _items(task, gain, name)} for task in TASKS} for name, gain in gains.items()}
    record: dict[str, Any] = {"tasks": list(TASKS), "models": {}}
    for name, units in items.items():
        settings = {"name": name, "weights": "0" * 64, "max_length": 256, "limit": limit, "batch_size": 8}
        settings |= {"dtype": "auto", "data": "local", "lm_eval": "0.4.9"}
        results = ModelResults(folder / name, settings)
        for task, of_task in units.items():
            metric, count, _ = TASKS[task]
            values = [item[metric] for item in of_task[task]]
            if isinstance(values[0], list):
                mean = math.exp(-sum(value[0] for value in values) / sum(value[1] for value in values))
            else:
                mean = sum(values) / len(values)
            metrics = {"alias": task, f"{metric},none": mean, f"{metric}_stderr,none": 0.02, "bad,none": "nan"}
            scores = {"metrics": metrics, "items": count, "items_of_the_task": 10 * count, "shots": 0, "version": 1.0}
            scores["environment"] = {"commit": "4567def" if task == "piqa" else "0123abc"}
            scores |= {"dtype": "float32", "device": "cpu", "deviation": "read as text" if task == "piqa" else None}
            results.save(task, scores, of_task[task])
        tasks = {task: results.scores(task) for task in units}
        groups = {"all": {"metrics": {"acc,none": 0.5, "acc_stderr,none": "N/A"}, "items": 500}}
        record["models"][name] = {"settings": settings, "dtype": "float32", "device": "cpu", "tasks": tasks}
        record["models"][name]["groups"] = groups
    first, *others = items.items()
    record["comparisons"] = [compare_models(first, other).to_dict() for other in others]
    write_json(folder / "evaluation.json", record)
    return folder


def _items(task: str, gain: float, name: str) -> list[dict[str, Any]]:
    metric, count, base = TASKS[task]
    shared, own = random.Random(task), random.Random(f"{task} {name}")
    found = []
    for i in range(count):
        if metric == "word_perplexity":
            value: Any = [-(base - gain + shared.gauss(0, 0.2) + own.gauss(0, 0.05)) * (i + 5), i + 5]
        else:
            value = float(shared.random() < base or own.random() < gain)
        found.append({"doc_id": i, "doc_hash": f"{i:064d}", "filter": "none", "metrics": [metric], metric: value})
    return found


@pytest.fixture(scope="session")
def make_evaluation() -> Callable[..., Path]:
    return write_evaluation
