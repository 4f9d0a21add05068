"""`depthroute evaluate` on a real checkpoint, against lm-eval's command line on the stock model, item by item.

    python measure.py MODEL DATA_ROOT WORK [--items 200] [--articles 3] [--generated 4]

MODEL is a checkpoint converted with the scheme `additive`, DATA_ROOT the local evaluation files, WORK a folder
for everything that is made on the way; what is finished there is not run again. Writes results.json beside this file;
write_readme.py makes README.md of it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

import depthroute  # noqa: F401  (registers the model)
from depthroute.convert import to_stock
from depthroute.training.environment import describe_environment

HERE = Path(__file__).parent
CHOSEN = ("arc_easy", "lambada_openai", "piqa", "hellaswag")
GENERATED = ("gsm8k", "humaneval", "mbpp")
BATCHES = (8, 1)
OFFLINE = {**os.environ, "HF_HUB_OFFLINE": "1"}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model", "data_root", "work"):
        parser.add_argument(name, type=Path)
    for name, default in {"items": 200, "articles": 3, "generated": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    model, work = given.model.resolve(), given.work.resolve()
    stock = make_stock(model, work / "stock")
    ours = {batch: ours_at(given, CHOSEN, given.items, batch, work / f"batch-{batch}") for batch in BATCHES}
    tasks = work / f"batch-{BATCHES[0]}" / "tasks"
    results: dict[str, Any] = {
        "items": given.items,
        "articles": given.articles,
        "tasks": {
            task: compare(
                {batch: items(folder, task) for batch, folder in ours.items()},
                command_line(stock, task, given.items, 8, tasks, work / "lm_eval"),
            )
            for task in CHOSEN
        },
        "wikitext": wikitext(given, stock, work),
        "generated": generated(given, work),
        "environment": {**describe_environment(), "lm_eval": version("lm_eval")},
    }
    results["environment"]["command"] = ["measure.py", *sys.argv[4:]]
    (HERE / "results.json").write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def make_stock(model: Path, folder: Path) -> Path:
    """The same tensors as a stock model of transformers."""
    if not (folder / "config.json").is_file():
        to_stock(AutoModelForCausalLM.from_pretrained(model)).save_pretrained(folder)
        AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    return folder


def ours_at(given: argparse.Namespace, tasks: Any, limit: int, batch: int, out: Path, *more: str) -> Path:
    """Run `depthroute evaluate`; returns the folder of the model's results."""
    command = [sys.executable, "-m", "depthroute.cli", "evaluate", str(given.model), "--tasks", ",".join(tasks)]
    command += ["--data-root", str(given.data_root), "--limit", str(limit), "--batch-size", str(batch)]
    subprocess.run([*command, "--dtype", "float32", "--out", str(out), *more], check=True, env=OFFLINE)
    (settings,) = out.glob("*/settings.json")
    return settings.parent


def command_line(stock: Path, task: str, limit: int, batch: int, tasks: Path, out: Path) -> list[dict[str, Any]]:
    """Run lm-eval's own command on the stock model, over the same task files; returns its items."""
    if not list(out.rglob(f"samples_{task}_*.jsonl")):
        command = [str(Path(sys.executable).parent / "lm_eval"), "run", "--model", "hf", "--tasks", task]
        command += ["--model_args", f"pretrained={stock},dtype=float32", "--include_path", str(tasks)]
        command += ["--limit", str(limit), "--batch_size", str(batch), "--log_samples", "--output_path", str(out)]
        subprocess.run(command, check=True, env=OFFLINE)
    (file,) = out.rglob(f"samples_{task}_*.jsonl")
    return sorted(map(json.loads, file.read_text(encoding="utf-8").splitlines()), key=lambda item: item["doc_id"])


def items(folder: Path, task: str) -> list[dict[str, Any]]:
    lines = (folder / f"{task}.items.jsonl").read_text(encoding="utf-8").splitlines()
    return sorted(map(json.loads, lines), key=lambda item: item["doc_id"])


def compare(ours: dict[int, list[dict[str, Any]]], theirs: list[dict[str, Any]]) -> dict[str, Any]:
    """Items, log-likelihoods and outcomes of three evaluations of one task."""
    others = {"lm_eval": theirs, **{f"batch {batch}": found for batch, found in ours.items()}}
    metrics = theirs[0]["metrics"]
    pairs = [("lm_eval", "batch 8"), ("lm_eval", "batch 1"), ("batch 8", "batch 1")]
    return {
        "items": len(theirs),
        "requests": sum(len(log_likelihoods(item)) for item in theirs),
        "same_documents": all(same(others, "doc_hash")),
        "same_prompts": all(same(others, "prompt_hash")),
        "scores": {
            name: {m: sum(float(i[m]) for i in found) / len(found) for m in metrics if m.startswith("acc")}
            for name, found in others.items()
        },
        "largest_difference": {f"{a}, {b}": largest_difference(others[a], others[b]) for a, b in pairs},
        "changed_outcomes": {f"{a}, {b}": changed(others[a], others[b], metrics) for a, b in pairs},
        "smallest_margin": min((margin(item) for item in theirs if len(item["resps"]) > 1), default=None),
    }


def same(others: dict[str, list[dict[str, Any]]], key: str) -> list[bool]:
    return [len({item[key] for item in row}) == 1 for row in zip(*others.values(), strict=True)]


def log_likelihoods(item: dict[str, Any]) -> list[float]:
    return [float(response[0][0]) for response in item["resps"]]


def largest_difference(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> float:
    return max(
        abs(x - y)
        for one, other in zip(first, second, strict=True)
        for x, y in zip(log_likelihoods(one), log_likelihoods(other), strict=True)
    )


def changed(first: list[dict[str, Any]], second: list[dict[str, Any]], metrics: list[str]) -> list[dict[str, Any]]:
    """The items of another outcome, with the margin between the two best answers."""
    return [
        {"doc_id": one["doc_id"], "metric": metric, "margin": margin(one)}
        for metric in metrics
        if metric.startswith("acc")
        for one, other in zip(first, second, strict=True)
        if one[metric] != other[metric]
    ]


def margin(item: dict[str, Any]) -> float | None:
    """In nats, between the two best answers; None where there is one answer."""
    best = sorted(log_likelihoods(item), reverse=True)
    return best[0] - best[1] if len(best) > 1 else None


def wikitext(given: argparse.Namespace, stock: Path, work: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for batch in BATCHES:
        folder = ours_at(given, ["wikitext"], given.articles, batch, work / f"wikitext-{batch}")
        scores = json.loads((folder / "wikitext.json").read_text(encoding="utf-8"))
        found[f"batch {batch}"] = scores["metrics"]["word_perplexity,none"]
        found["of"] = scores["items_of_the_task"]
        found["words"] = sum(item["word_perplexity"][1] for item in items(folder, "wikitext"))
    tasks = work / f"wikitext-{BATCHES[0]}" / "tasks"
    command_line(stock, "wikitext", given.articles, 1, tasks, work / "lm_eval-wikitext")
    (file,) = (work / "lm_eval-wikitext").rglob("results_*.json")
    theirs = json.loads(file.read_text(encoding="utf-8"))
    found["lm_eval"] = theirs["results"]["wikitext"]["word_perplexity,none"]
    return found


def generated(given: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Tasks whose answers are generated, on a few items, code in the sandbox."""
    folder = ours_at(given, GENERATED, given.generated, 8, work / "generated", "--allow-code")
    found = {}
    for task in GENERATED:
        scores = json.loads((folder / f"{task}.json").read_text(encoding="utf-8"))
        values = {name: value for name, value in scores["metrics"].items() if "," in name and "stderr" not in name}
        found[task] = {"items": scores["items"], "shots": scores["shots"], "metrics": values}
    return found


if __name__ == "__main__":
    main()
