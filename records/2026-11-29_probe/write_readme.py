"""Make README.md of results/: python write_readme.py"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

HERE = Path(__file__).parent
SEEDS = (0, 1, 2)

TEXT = """\
# What single-head and multi-head queries learned in the quickstart's models

Two arms of the quickstart (`mhar` with H = 1 and with H = KV = 4; 6 layers, width 96, {parameters:,} parameters,
{tokens:,} tokens of books), seeds 0 to 2, probed on {probed:,} tokens of held-out books with 8 random queries \
of the same
norm beside each trained one. They show that the probe works on models that this project trained, and what it says of
such small ones; the paper's models are a hundred to a thousand times larger and saw ten thousand times as much text.

Made by (CPU; {processor}; torch {torch}, transformers {transformers}, commit {commit}{dirty}):

    python records/2026-11-29_probe/run.py OUT
    python records/2026-11-29_probe/write_readme.py

## H = 1: do slices of the width want other sources than the whole?

KL of the distribution that each of 4 slices of the query would choose, alone, from the one that the site uses; mean
over tokens, sites and slices (nats).

| | trained | random query | excess | cosine of two sources | held-out loss |
| --- | --- | --- | --- | --- | --- |
{single}
| paper, 100M | .273 | .038 | .235 | .060 | |
| paper, 350M | .570 | .058 | .512 | .114 | |
| paper, 1B | .701 | .095 | .606 | .087 | |
| paper, 124M at D = 768 | .311 | .030 | .281 | | |

Mean and standard deviation over {n} seeds: excess {excess}. Interleaved slices: {interleaved}.

A slice has a quarter of the query, so alone it is also *softer* than the whole, which is a disagreement even where all
slices want the same. With each slice's logits scaled to the strength of the whole's, the trained queries disagree
**less** than random ones: {equal} against {equal_null} (mean over seeds). So here the excess in the paper's measure is
that trained queries are sharper than what their slices make alone, not that slices want different sources.

## H = KV: do the heads read differently?

The weights of each head, averaged over tokens, minus the mean over heads: the largest deviation over sites, sources
and heads; its correlation on other text (the other half of the documents); the correlation between heads, which is -1/3
by chance for four deviations that sum to zero.

| | largest deviation | random query | correlation on other text | random query | between heads | held-out loss |
| --- | --- | --- | --- | --- | --- | --- |
{multi}
| paper (trained MHAR) | .28 | .067 | .77 | | nearly uncorrelated | |

The heads of these small models deviate no more than random queries of the same norm do: {deviation} against
{deviation_null} (mean over seeds). That a deviation repeats on other text says little by itself: so does that \
of a random
query.

## What this does not show

Anything about models of a useful size: the queries are young (400 steps) and the sources narrow (24 channels a head).
The same probe on models of the paper's 100M shape is in [study A](../2026-11-29_study-a).
"""


def load(arm: str, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    folder = HERE / "results" / arm / f"seed-{seed}"
    return json.loads((folder / "probe.json").read_text()), json.loads((folder / "summary.json").read_text())


def row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def three(*values: float) -> list[str]:
    return [f"{value:.3f}" for value in values]


def spread(values: list[float]) -> str:
    return f"{mean(values):.3f} ± {stdev(values):.3f}"


def main() -> None:
    single, multi = ([load(arm, seed) for seed in SEEDS] for arm in ("mhar-h1", "mhar-kv"))
    kl = [probe["disagreement"] for probe, _ in single]
    heads = [probe["heads"]["deviation"] for probe, _ in multi]
    probe, summary = single[0]
    environment = probe["environment"]
    text = TEXT.format(
        parameters=summary["parameters"],
        tokens=summary["tokens"],
        probed=probe["tokens"],
        processor=environment["devices"][0],
        torch=environment["packages"]["torch"],
        transformers=environment["packages"]["transformers"],
        commit=environment["commit"][:12],
        dirty=" with local changes elsewhere" if environment["dirty"] else "",
        n=len(SEEDS),
        single="\n".join(
            row(
                f"seed {seed}",
                *three(*(found["disagreement"]["contiguous"][key] for key in ("kl", "null", "excess"))),
                *three(found["collinearity"]["cosine"], run["final_loss"]),
            )
            for seed, (found, run) in zip(SEEDS, single, strict=True)
        ),
        excess=spread([found["contiguous"]["excess"] for found in kl]),
        interleaved=spread([found["interleaved"]["excess"] for found in kl]),
        equal=f"{mean(found['equal_strength']['kl'] for found in kl):.3f}",
        equal_null=f"{mean(found['equal_strength']['null'] for found in kl):.3f}",
        multi="\n".join(
            row(
                f"seed {seed}",
                *three(found["largest"]["largest"], found["largest"]["null"]),
                *three(found["split_half"]["r"], found["split_half"]["null"], found["between_heads"]["r"]),
                *three(run["final_loss"]),
            )
            for seed, found, (_, run) in zip(SEEDS, heads, multi, strict=True)
        ),
        deviation=f"{mean(found['largest']['largest'] for found in heads):.3f}",
        deviation_null=f"{mean(found['largest']['null'] for found in heads):.3f}",
    )
    (HERE / "README.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
