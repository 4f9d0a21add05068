"""README.md of this record, from the files of its runs: python write_readme.py"""

import json
import statistics
from pathlib import Path

HERE = Path(__file__).parent
ARMS = ("additive", "mhar")


def read(arm):
    folder = HERE / "runs" / arm
    summary = json.loads((folder / "summary.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    speeds = [line["tokens_per_second"] for line in lines if line["kind"] == "train"][1:]
    losses = {line["step"]: line for line in lines if line["kind"] == "evaluation"}
    return summary, speeds, losses


def main():
    runs = {arm: read(arm) for arm in ARMS}
    environment = json.loads((HERE / "runs" / "mhar" / "environment.json").read_text())
    packages = environment["packages"]
    steps = sorted(runs["additive"][2])
    table = [
        "| arm | parameters | of these residual | "
        + " | ".join(f"held-out loss, step {s}" for s in steps)
        + " | tokens/s (least to most) | peak memory | time to first step |",
        "|" + "---|" * (len(steps) + 6),
    ]
    for arm, (summary, speeds, losses) in runs.items():
        table.append(
            f"| `{arm}` | {summary['parameters']:,} | {summary['residual_parameters']:,} | "
            + " | ".join(f"{losses[s]['loss']:.4f}" for s in steps)
            + f" | {statistics.median(speeds):,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})"
            f" | {summary['peak_memory_bytes'] / 1e9:.2f} GB | {summary['seconds_to_first_step']:.0f} s |"
        )
    (additive, plain, base), (mhar, routed, other) = runs["additive"], runs["mhar"]
    speed = statistics.median(routed) / statistics.median(plain)
    memory = mhar["peak_memory_bytes"] / additive["peak_memory_bytes"]
    difference = other[steps[-1]]["loss"] - base[steps[-1]]["loss"]
    text = f"""# The 100M shape for 200 steps on one H200

Does the 100M preset train on real files, how fast, and in how much memory: the plain Transformer and full multi-head
attention residuals (`mhar`, H = 4 KV heads).

{chr(10).join(table)}

`mhar` against `additive`: {speed:.3f}x the tokens/s, {memory:.3f}x the peak memory, {difference:+.4f} nats of held-out
loss at step {steps[-1]}. The unigram entropy of the held-out text is {additive["unigram_entropy"]:.4f} nats.

One step is {additive["tokens"] // additive["steps"]:,} tokens (16 x 2048), bf16 autocast over fp32 weights,
`torch.compile`, fused AdamW, the Qwen3 tokenizer (151,936 words), {additive["tokens"] / 1e6:.2f} M tokens of textbooks
(each used once), {base[steps[-1]]["num_tokens"]:,} held-out tokens of other documents. Tokens/s are of training alone,
without evaluation and saving: the median over {len(plain)} readings of 10 steps, after the first. The arms ran at
the same time, each alone on one of two cards of the same host, and with empty caches of its own.

What this does not show: which is better. It is one seed, 200 steps and a held-out set of
{base[steps[-1]]["num_tokens"]:,} tokens.

## How

    mkdir data   # openstax.train-000.jsonl.xz, openstax.val.jsonl.xz, and the Qwen3 tokenizer as data/qwen3/
    depthroute train {HERE.parent.name}/{HERE.name}/additive.yaml --out runs/additive
    depthroute train {HERE.parent.name}/{HERE.name}/mhar.yaml --out runs/mhar
    python {HERE.parent.name}/{HERE.name}/write_readme.py

Commit {environment["commit"][:12]}; {", ".join(environment["devices"])}, Python {environment["python"]}, torch
{packages["torch"]} (CUDA {environment["cuda"]}), Triton {packages["triton"]}, transformers {packages["transformers"]}.
"""
    (HERE / "README.md").write_text(text)


if __name__ == "__main__":
    main()
