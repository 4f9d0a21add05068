"""Make README.md of train.json: python write_readme.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from depthroute.files import write_text
from depthroute.report.markdown import steps_table

HERE = Path(__file__).parent
PRESETS = ("100m", "350m", "1b")
AIM = 0.90

TEXT = """\
# Whole training steps, once attention has no mask

{device}, torch {torch}, Triton {triton}; bf16 weights, gradients and optimizer state (fused AdamW), vocabulary
151,936, the paper's microbatches, one microbatch a step: forward, backward, clipping, AdamW. Made at ece932e by

    depthroute bench train --out OUT --preset 1b 350m 100m --graphs --processes

The arms take turns of 5 steps, 5 times; each is a process of its own, so that they compile at the same time. The other
card of the host trained a model of [study A](../2026-11-29_study-a) meanwhile.

{steps}

Median (least to most) of the turns; the ratio is the median over turns. Busy: milliseconds of kernels on the GPU. First
step: with six arms compiling at the same time, cold caches.

- The aim is {aim:.2f}x: {reached}.
  Memory is within the aim of 1.08x.
- Beside the [record before](../2026-11-29_train-steps) (ac88116) every arm is faster, since a model compiled as a whole
  attends without a mask that it does not need: milliseconds a step of `additive` went from {before}.
  What routing adds is a larger part of that; its reads of few sources became faster meanwhile
  ([inter-reads](../2026-11-30_inter-reads)).
- At 100m `additive` had been 3 % faster *without* graphs in that record. That was not measured again.
- Routing keeps the GPU busy for {extra} ms longer at 100m, 350m and 1b.
- Eight heads and one were not compared here, nor autocast, eager steps or other microbatches.
"""


def rows_of(record: Path) -> dict[tuple[str, str], dict[str, Any]]:
    rows = json.loads((record / "train.json").read_text(encoding="utf-8"))["rows"]
    return {(row["preset"], row["scheme"]): row for row in rows}


def main() -> None:
    environment = json.loads((HERE / "train.json").read_text(encoding="utf-8"))["environment"]
    rows, old = rows_of(HERE), rows_of(HERE.parent / "2026-11-29_train-steps")
    ratios = {preset: rows[preset, "mhar"]["of_first"] for preset in PRESETS}
    text = TEXT.format(
        **environment,
        aim=AIM,
        steps=steps_table(rows[preset, scheme] for preset in PRESETS for scheme in ("additive", "mhar")),
        reached=", ".join(
            f"{preset} {'reached' if ratio >= AIM else '**not reached**'} ({ratio:.3f})"
            for preset, ratio in ratios.items()
        ),
        before=", ".join(
            f"{old[preset, 'additive']['step_ms']:.1f} to {rows[preset, 'additive']['step_ms']:.1f} ({preset})"
            for preset in PRESETS
        ),
        extra=", ".join(
            f"{rows[preset, 'mhar']['busy_ms'] - rows[preset, 'additive']['busy_ms']:.1f}" for preset in PRESETS
        ),
    )
    write_text(HERE / "README.md", text)


if __name__ == "__main__":
    main()
