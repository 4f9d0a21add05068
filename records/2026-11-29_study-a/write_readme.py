"""Make README.md, figures/, results/results.csv and results.json of the runs that are in results/:

python write_readme.py [FOLDER]     (another folder with results/ in it, and results-long/ where there is one)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from depthroute.files import write_text
from depthroute.report import markdown
from depthroute.report.comparison import Comparison, compare
from depthroute.report.curves import difference_band
from depthroute.report.folders import Group
from depthroute.report.formats import count
from depthroute.report.record import draw, environments, read_study, settled
from depthroute.report.runs import parse_yaml
from depthroute.studies.landing_command import OVERRIDES

HERE = Path(__file__).parent
ONE, SCALED, KV = "mhar-h1", "mhar-h1-scaled", "mhar-h4"
PAIRS = ((KV, ONE), (SCALED, ONE), (KV, SCALED), ("mhar-h2", ONE), ("mhar-h8", KV), ("mhar-h16", KV))
PAIRS += (("block_mhar-h4", KV), ("hyper_connections-static", ONE), ("denseformer", ONE), ("mhc", ONE))

TEXT = """\
# Study A: every scheme at the paper's 100M shape, one pass over an open corpus

{finished} of {planned} runs are finished; what is missing or has failed stands under [Runs](#runs).

Does reading over depth help at this shape, and do several heads help beyond what their temperature does? Width 512, 12
layers, 8 attention heads, 4 KV heads ({parameters}), GPT-2's tokenizer, {steps} steps of
{per_step} tokens of books, encyclopedia, textbooks and documentation ({tokens} tokens, each at most once),
cosine with warm-up, peak 1e-3, weight decay 0.1 on everything. Held out by document: {held_out} tokens, half of them
of six books. Runs of one seed share their initial weights and the order of their data. The recipes:
[study-a.yaml](../../recipes/studies/study-a.yaml) over
[open-corpus.yaml](../../recipes/studies/base/open-corpus.yaml); each run's own, resolved, is in `results/runs/`.

## What holds, and what does not

{statement}

## Losses, differences, speed, memory

{arms}

Held-out loss: nats a token, the mean of the last {tail} evaluations; ± is the standard deviation over seeds.
Differences are paired by seed: mean ± standard error; p of a two-sided paired t-test, not corrected for the number of
arms. "At the last step": of `additive` the loss, of the others the paired difference. Tokens/s: median over the log
lines, evaluation and saving left out; one run trained on the card at a time, while the next one compiled on the host.
\\* no fused kernels: the speed of compiled PyTorch. Memory: the most that the allocator held while training.
{speeds}
## Between the arms

{pairs}

## At equal steps and at equal time

{readings}

{seeds} Each arm at its own median speed. A slower arm is
read in the middle of its schedule, before its rate has come down, where the fastest arm has ended: the second column
bounds what it loses, no more. It also mixes hosts (see the speeds by commit), and `additive` ran on faster ones.

## Over the run

![held-out loss over tokens](figures/loss.svg)

![held-out loss minus additive](figures/difference.svg)

{curves}

Mean over the finished seeds, and over the pairs of seeds.

## What the queries learned

{probes}

KL: nats between the read of a slice of the query alone and the read itself, for H = 1 (null: random queries of the same
norm); deviation of a head from the mean of the heads, for H > 1. 131,072 held-out tokens of OpenStax and Wikipedia.
{long}
## Beside the paper

arXiv 2607.27230, second version, 100M shape, FineWeb-Edu, 20,000 steps of 131,072 tokens (20 times ours), Qwen3's
tokenizer, losses minus the baseline:

| | hyper-connections (static) | H = 1 | H = KV |
| --- | --- | --- | --- |
| the paper, peak 1e-3, one seed | -0.014 | -0.039 | -0.049 |
| the paper, peak 5e-4, three seeds | -0.031 ± 0.003 | -0.043 ± 0.003 | -0.045 ± 0.007 |
| here, peak 1e-3 | {here_static} | {here_one} | {here_kv} |

Its routed model trains at 0.88 times the baseline's tokens/s, with 42.0 GB against 41.5. Its probe: KL 0.273, null
0.038, excess 0.235; cosine of sources 0.060. Its first version (another corpus, H = 8) has -0.061 at this shape. Its
validation text is not held out from training; ours is, by document. A report since then has H = 1 at the temperature of
H = KV recover most of the gain of H = KV over H = 1 (at 350M: 2.847 against 2.848, and 2.876 for plain H = 1): the arm
`{scaled}` asks this.

## Runs

{missing}

{environment}

    python records/2026-11-29_study-a/run.py OUT     # in pieces: run it again to go on
    mkdir -p records/2026-11-29_study-a/results
    for archive in OUT/archives/*.tar.xz; do tar -xJf "$archive" -C records/2026-11-29_study-a/results; done
    python records/2026-11-29_study-a/write_readme.py

## What limits this

- The runs with seed 0 of `additive`, `mhar-h4` and `mhar-h1` shared their host, and at times their card, with tests and
  benchmarks: `mhar-h4` took its steps from 1,710 to 1,900 at about half its speed. `mhar-h1` waited 267 s for the card
  before its tenth step. Speeds are medians over the log lines, which this moves little; those of runs without such
  company on the card are in [train-steps](../2026-11-29_train-steps). The runs with seed 1 had their cards to
  themselves; on the other card of the host another run or a benchmark was at work. `mhar-h4` compiled ahead and then
  waited for its turn, which its time in all includes.
- {tokens} tokens are a twentieth of the paper's; what is ahead here need not be at the end of a long run.
- One learning rate for all arms. The paper's single-head arm prefers half of it at larger shapes.
- Arms with one seed have no error bar. Three seeds make a wide one. A repeat of a run with other kernels differs by
  0.005 (see the speeds).
- The embedding of the end-of-text token, which stands between documents, started at zero and was learned as an output
  alone, in all runs at the commits above ([log](../../docs/log.md)). What difference that makes here is not known.
- The probed text is held out and of two kinds. Half of the text of the losses is six books.
"""


def main(place: Path) -> None:
    folder, comparisons = read_study("studies/study-a", place / "results", overrides=OVERRIDES)
    group, readings = folder.groups[0], comparisons["readings"]
    comparison = compare(group)
    draw(group, place / "figures")
    finished = [run for run in group.runs if run.finished]
    recipe = parse_yaml(finished[0].recipe) if finished else {}
    parameters = {run.number("parameters") for run in group.of("additive") if run.finished}
    steps = [line["step"] for line in finished[0].evaluations] if finished else []
    text = TEXT.format(
        finished=len(finished),
        planned=len(group.runs),
        parameters=f"{count(parameters.pop())} parameters without routing" if parameters else "no baseline is finished",
        steps=count(recipe["training"]["steps"]) if recipe else "no",
        per_step=count(tokens_per_step(recipe)),
        tokens=count(finished[0].number("tokens")) if finished else "no",
        held_out=count(finished[0].evaluations[-1]["num_tokens"]) if finished else "no",
        statement="\n".join(f"- {sentence}" for sentence in statement(group, comparison, readings)),
        arms=markdown.arms_table(group, comparison),
        tail=count(comparison.tail_evaluations),
        speeds=speeds_by_commit(group),
        pairs=markdown.pairs_table(group, PAIRS),
        readings=markdown.readings_table(readings, group.arms),
        seeds=markdown.seeds_of(readings),
        curves=markdown.curve_table(group, shown(steps)),
        probes=markdown.probe_table([("", group)]),
        long=long_part(place / "results-long"),
        here_static=difference(comparison, "hyper_connections-static"),
        here_one=difference(comparison, ONE),
        here_kv=difference(comparison, KV),
        scaled=SCALED,
        missing=markdown.missing_runs(folder),
        environment=environments(folder),
    )
    write_text(place / "README.md", text)


def speeds_by_commit(group: Group) -> str:
    """Tokens/s of the arms at each commit, where the runs are of several."""
    found: dict[str, dict[str, list[float]]] = {}
    for run in group.runs:
        speed = run.number("tokens_per_second") if run.finished else None
        if speed is not None and run.environment:
            found.setdefault(str(run.environment["commit"]), {}).setdefault(run.arm, []).append(speed)
    if len(found) < 2:
        return ""
    lines = [
        "",
        "The runs are of several commits. Between the first two attention got rid of a mask, between the others the",
        "kernels of the reads changed ([log](../../docs/log.md)), so the column above mixes speeds; and hosts. That of",
        "e7e1bc0 was slower: with the same kernels and as many of them `mhar-h4` had 605,000 to 615,000 on another. "
        "That was a",
        "repeat with seed 1 (a9f8df4, up to step 1,800), which had 4.102 and 3.899 at steps 1,100 and 1,800, where the",
        "run here has 4.107 and 3.904 ([repeat.log](repeat.log)). By commit:",
        "",
        "| commit | arm | seeds | tokens/s | of additive |",
        "| --- | --- | --- | --- | --- |",
    ]
    for commit, arms in found.items():
        baseline = median(arms["additive"]) if "additive" in arms else None
        for arm, speeds in arms.items():
            ratio = f"{median(speeds) / baseline:.3f}x" if baseline else ""
            lines.append(f"| {commit[:7]} | `{arm}` | {len(speeds)} | {median(speeds):,.0f} | {ratio} |")
    return "\n".join([*lines, ""])


def tokens_per_step(recipe: Mapping[str, Any]) -> int | None:
    return recipe["training"]["batch_size"] * recipe["data"]["sequence_length"] if recipe else None


def shown(steps: Sequence[int]) -> list[int]:
    """Some of the steps of a curve, closer together where it is steep."""
    places = (0, 0.05, 0.1, 0.25, 0.5, 0.75, 1)
    return sorted({min(steps, key=lambda step: abs(step - place * steps[-1])) for place in places}) if steps else []


def statement(group: Group, comparison: Comparison, readings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield from comparison.statement
    for arm, other, question in (
        (KV, ONE, "H = 4 against H = 1"),
        (SCALED, ONE, "H = 1 at the temperature of H = 4 against H = 1"),
        (KV, SCALED, "H = 4 against H = 1 at its temperature"),
    ):
        found = markdown.paired(group, arm, other, "final_loss")
        if found is not None:
            yield f"{question}, at the last step: {markdown.with_error(found, signed=True)}. {settled(found)}"
            yield from crossing(group, arm, other)
    seconds = next((reading for reading in readings if reading["axis"] == "seconds"), None)
    if seconds:
        ranked = sorted(seconds["losses"], key=lambda arm: seconds["losses"][arm])
        yield (
            f"At equal training time ({seconds['at']:,.0f} s) the order is, over the seeds that all arms have: "
            + ", ".join(f"{arm} {seconds['losses'][arm]:.4f}" for arm in ranked)
            + "."
        )
    yield from comparison.cautions


def crossing(group: Group, arm: str, other: str) -> Iterator[str]:
    """Where the order of two arms last changed over the run."""
    both = Group(group.point, (other, arm), other, group.runs)
    band = difference_band(both.pairs(arm))
    if band is None or len(band.tokens) < 3:
        return
    signs = band.mean[1:] < 0  # at the first evaluation nothing is learned yet
    changes = [i for i in range(1, len(signs)) if signs[i] != signs[i - 1]]
    ahead = arm if signs[-1] else other
    where = f"from {band.tokens[1:][changes[-1]] / 1e6:,.1f} M tokens on" if changes else "at every evaluation"
    yield f"On the mean over seeds `{ahead}` is ahead {where} (changes of the order: {len(changes)})."


def difference(comparison: Comparison, arm: str) -> str:
    found = next((one.difference for one in comparison.arms if one.name == arm), None)
    return markdown.with_error(found, signed=True)


def long_part(results: Path) -> str:
    """The runs at 6,000 steps, where there are any."""
    if not results.is_dir():
        return ""
    folder, _ = read_study("studies/study-a-long", results, overrides=OVERRIDES)
    group = folder.groups[0]
    return "\n".join(
        (
            "\n## At 6,000 steps\n",
            "Kernels replayed as CUDA graphs, so speeds do not compare with those above.\n",
            markdown.arms_table(group, compare(group)),
            "",
            markdown.pairs_table(group, ((KV, ONE), (SCALED, ONE))),
            "",
            markdown.missing_runs(folder),
            "",
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
