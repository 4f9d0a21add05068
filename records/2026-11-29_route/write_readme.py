"""Make README.md of route.json and sweep.json: python write_readme.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent

TEXT = """\
# All depth reads of one microbatch: two phases against one kernel a read

{device}; torch {torch}, triton {triton}; bf16; the kernels of commit 9006287 (other files had local changes). Made by

    depthroute bench route --out OUT --arms engine read --budget 80
    depthroute bench route --out OUT --sweep --shapes 350m 1b --budget 90

A chain of sites joined by a cheap elementwise map, forward and backward; the map alone is subtracted from graph
replays and not from eager launches. Every arm was first checked: two runs equal bit for bit, and errors against fp64
of at most 1.5 times those of plain PyTorch in bf16.

| shape | sites, width, heads | tokens | arm | graph replay, ms | eager, ms | error by the reference's | peak memory \
| first call |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
{rows}

Replays: median (least to most) of 7 samples of 5. Error: the largest ratio over output, input, query and norm-weight
gradients. First call: with cold caches, seconds, of all kernels of the shape. Measured again, after work \
on the kernels:
[route-kernels](../2026-11-29_route-kernels).

The aim was 1.0 (100m), 1.35 (350m) and 4.0 ms (1b): it is **not reached**. In whole models
([mid-training](../2026-11-29_smollm2-mid-training), [two-gpus](../2026-11-29_two-gpus)) routing took longer than
these times, scaled by tokens and rows, would say: [train-steps](../2026-11-29_train-steps) found why.

## Settings

The sweep measured {tried} settings and was cut by its time; the best three of each kernel are below (the middle tile of
the chain, inputs from memory). Chosen since, for what they gain on both shapes: merges with 2 warps forward and 4
backward (unroll 2, parts 264: 27.1 and 35.6 microseconds), inter reads with 32 sources at once and 16 and 8 warps. The
table above is from before that.

| shape | kernel | settings | microseconds |
| --- | --- | --- | --- |
{settings}
"""


def main() -> None:
    route = json.loads((HERE / "route.json").read_text())
    sweep = json.loads((HERE / "sweep.json").read_text())["results"]
    rows = "\n".join(map(_row, sorted(route["rows"], key=lambda row: ("100m", "350m", "1b").index(row["shape"]))))
    text = TEXT.format(**route["environment"], rows=rows, settings="\n".join(_best(sweep)), tried=len(sweep))
    (HERE / "README.md").write_text(text, encoding="utf-8")


def _row(row: dict[str, Any]) -> str:
    arm = {"engine": "two phases", "read": "one kernel a read"}[row["arm"]]
    graph, checked = row["graph_ms"], row["check"]
    cells = [
        row["shape"],
        f"{row['sites']}, {row['width']}, {row['heads']}",
        f"{row['tokens']:,}",
        arm,
        f"{graph['median']:.3f} ({graph['least']:.3f} to {graph['most']:.3f})",
        f"{row['eager_ms']['median']:.1f}",
        f"{checked['ratio']:.2f}",
        f"{row['peak_memory'] / 2**20:.0f} MiB",
        f"{checked['first_call_s']:.1f} s",
    ]
    return "| " + " | ".join(cells) + " |"


def _best(results: list[dict[str, Any]]) -> list[str]:
    lines = []
    for shape, phase in dict.fromkeys((found["shape"], found["phase"]) for found in results):
        ours = [found for found in results if (found["shape"], found["phase"]) == (shape, phase)]
        for found in sorted(ours, key=lambda found: found["ms"])[:3]:
            settings = ", ".join(f"{key.removeprefix(phase + '_')} {value}" for key, value in found["settings"].items())
            lines.append(f"| {shape} | {phase.replace('_', ' ')} | {settings} | {1e3 * found['ms']:.1f} |")
    return lines


if __name__ == "__main__":
    main()
