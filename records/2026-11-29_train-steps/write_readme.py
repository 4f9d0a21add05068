"""Make README.md of train.json and profiles/: python write_readme.py"""

from __future__ import annotations

import json
import re
from pathlib import Path

from depthroute.files import write_text
from depthroute.report.markdown import steps_table, table

HERE = Path(__file__).parent
PRESETS = ("100m", "350m", "1b")
HEAD = re.compile(
    r"(\w+)-(\w+)-(\w+)-bf16: wall ([\d.]+) ms, host ([\d.]+), busy ([\d.]+) ms, (\d+) kernels, "
    r".*peak ([\d.]+)"
)
MEMORY = ("peak memory, GiB", "of additive")
HOW = {"full": "compiled", "parts": "compiled in parts", "graphs": "compiled, CUDA graphs"}

TEXT = """\
# Whole training steps: what routing costs, and where the time goes

{device}, torch {torch}, Triton {triton}; bf16 weights, gradients and optimizer state (fused AdamW), vocabulary
151,936, the paper's microbatches, one microbatch a step: forward, backward, clipping, AdamW. Made at ac88116 by

    depthroute bench train --out OUT --preset 1b 350m 100m --graphs --processes

The arms take turns of 5 steps, 5 times; each is a process of its own, so that they compile at the same time. The other
card of the host was training meanwhile.

{steps}

Median (least to most) of the turns; the ratio is the median over turns. Busy: milliseconds of kernels on the GPU. First
step: with six arms compiling at the same time, cold caches.

- The aim is 0.90x: **not reached**, though near at 100m ({r100}, {r350}, {r1b}). Memory is within the aim of 1.08x.
- At 100m `additive` is faster *without* CUDA graphs (377,006 tokens/s below, an earlier run on the same kind of card).
  Beside that `mhar` stands at {beside:.2f}x.
- Eight heads and one were not compared here, nor autocast, eager steps or other microbatches.

## Before: the host was the limit

Profiles of single arms, not interleaved, in earlier runs: without CUDA graphs at 1c81300, with them at 1c6b777. Host:
until Python had launched a step; where the GPU is the slower one, Python waits for it in places.

{before}

So `mhar` took 1.4 to 3.1 times as long as `additive`, while the GPU was busy for 1.16 to 1.24 times as long. Launches
from Python were the limit: 164 of them at 1b, a third to two thirds of a millisecond each. Of that, 70 to 700
microseconds were Triton's look at each of tens of arguments, which is left out since 1c6b777
([launches.txt](profiles/1c6b777/launches.txt): few tokens, so that the host alone is timed). CUDA graphs take away the
rest. What is left are the kernels: `mhar` keeps the GPU busy longer than `additive` by 6.4, 7.6 and 9.9 ms at 100m,
350m and 1b before they were worked over, and by 5.0, 7.4 and 7.5 ms at ac88116
([route-kernels](../2026-11-29_route-kernels)).

Attention is slower in a model compiled as a whole than in one compiled in parts, for both schemes: at 350m 5.9 against
2.9 ms a step. It gets a mask there that it does not need ([log](../../docs/log.md)).

`profiles/` has every kernel's time; `_backward_kernel` and `_forward_kernel` are those of routing.
[profile_steps.py](profile_steps.py) makes such a profile (the ones here were made by an earlier form of it).
"""


def main() -> None:
    found = json.loads((HERE / "train.json").read_text())
    rows = sorted(found["rows"], key=lambda row: PRESETS.index(row["preset"]))
    ratio = {row["preset"]: row["of_first"] for row in rows if row["scheme"] == "mhar"}
    speed = next(row for row in rows if (row["preset"], row["scheme"]) == ("100m", "mhar"))["tokens_per_second"][
        "median"
    ]
    text = TEXT.format(
        **found["environment"],
        steps=steps_table(rows),
        before=table(
            ["shape", "scheme", "how", "step, ms", "host, ms", "busy, ms", "kernels", "peak memory, GiB"],
            [cells for commit in ("1c81300", "1c6b777") for cells in _profiles(HERE / "profiles" / commit)],
        ),
        r100=f"{ratio['100m']:.3f}",
        r350=f"{ratio['350m']:.3f}",
        r1b=f"{ratio['1b']:.3f}",
        beside=speed / 377_006,
    )
    write_text(HERE / "README.md", text)


def _profiles(folder: Path) -> list[list[str]]:
    heads = [HEAD.match(path.read_text()) for path in folder.glob("*-bf16.txt")]
    found = sorted((head.groups() for head in heads if head), key=lambda h: (PRESETS.index(h[0]), h[2], h[1]))
    return [[h[0], f"`{h[1]}`", HOW[h[2]], *h[3:]] for h in found]


if __name__ == "__main__":
    main()
