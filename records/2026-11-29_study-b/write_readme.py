"""Make README.md, figures/, results/results.csv and results.json of the runs that are in results/:

    python write_readme.py [FOLDER [STUDY_A]]     (other folders, each with results/ in it)

The runs at width 512 are study A's: they are copied from its results/ where they are finished there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from depthroute.files import write_text
from depthroute.report import markdown
from depthroute.report.comparison import compare
from depthroute.report.drawing import legend, styled, to_svg, wide
from depthroute.report.folders import Folder, Group, read_folder
from depthroute.report.formats import ABSENT, count, decimals, loss
from depthroute.report.record import draw, environments, read_study, settled
from depthroute.report.style import strokes
from depthroute.studies.landing_command import OVERRIDES

HERE = Path(__file__).parent
STUDY_A = HERE.parent / "2026-11-29_study-a"
BASELINE, ONE, SCALED, KV = "additive", "mhar-h1", "mhar-h1-scaled", "mhar-h4"
PAIRS = ((ONE, BASELINE), (KV, BASELINE), (KV, ONE), (SCALED, ONE), (KV, SCALED))

TEXT = """\
# Study B: multi-head against single-head depth routing across widths

{finished} of {planned} runs are finished; what is missing or has failed stands under [Runs](#runs).

If several route heads help because one softmax must serve too wide a stream, they help more where the stream is wider,
and the slices of a single query disagree more there. Width 256, 512 and 768 at 12 layers, head dimension 64, 4 KV heads
and FFN 3 D; everything else as in [study A](../2026-11-29_study-a), whose runs at width 512 serve here again. The
recipes: [study-b.yaml](../../recipes/studies/study-b.yaml) over
[open-corpus.yaml](../../recipes/studies/base/open-corpus.yaml).

## What holds, and what does not

{statement}

## Against width

![differences against width](figures/width.svg)

{widths}

Held-out loss: nats a token, the mean of the last evaluations of each run. Differences are paired by seed: mean ±
standard error. Disagreement: the KL divergence, in nats, between what a slice of the query of an H = 1 model reads
alone and what its site reads, on 131,072 held-out tokens; null: random queries of the same norm; means over the seeds.

{arms}

## At equal steps and at equal time

{readings}

## What the queries learned

{probes}

## Beside the paper

arXiv 2607.27230, width control at 20,000 steps, peak 5e-4: baseline, H = 1 and H = KV at 3.220, 3.187 and 3.167 (width
768) against 3.462, 3.421 and 3.412 (width 512), so H = KV minus H = 1 is -0.020 and -0.009. Its probe: KL 0.311, null
0.030, excess 0.281 (width 768) against 0.273, 0.038 and 0.235 (width 512). It gives no FFN width for 768; ours is 3 D.

## Runs

{missing}

{environment}

    python records/2026-11-29_study-b/run.py OUT     # in pieces: run it again to go on
    mkdir -p records/2026-11-29_study-b/results
    for archive in OUT/archives/*.tar.xz; do tar -xJf "$archive" -C records/2026-11-29_study-b/results; done
    python records/2026-11-29_study-b/write_readme.py

## What limits this

- Two seeds: read the signs and the sizes of the differences, not their p.
- One learning rate for all widths; a wider model may want a lower one.
- The runs at width 512 are from before the end-of-text token's embedding learned as the others do (see
  [docs/log.md](../../docs/log.md)); those at 256 and 768 have no such fault. All arms of a width are alike in it.
- At widths 256 and 768 kernels are replayed as CUDA graphs, at 512 launched: speeds compare within a width.
- With the width the number of attention heads and the share of the embedding change too.
- A twentieth of the paper's tokens.
"""


def main(place: Path, study_a: Path, overrides: Sequence[str] = OVERRIDES) -> None:
    folder, comparisons = read_study(
        "studies/study-b", place / "results", overrides=overrides, reuse=[study_a / "results"]
    )
    for group in folder.groups:
        draw(group, place / "figures", f"-{group.point.partition('=')[2]}")
    figure = against_width(folder)
    if figure is not None:
        write_text(place / "figures/width.svg", to_svg(figure))
    text = TEXT.format(
        finished=sum(run.finished for run in folder.runs),
        planned=len(folder.runs),
        statement="\n".join(f"- {sentence}" for sentence in statement(folder)),
        widths=widths_table(folder),
        arms="\n\n".join(arms_part(group) for group in folder.groups),
        readings=readings_part(folder, comparisons["readings"]),
        probes=markdown.probe_table([(f", {group.point}", group) for group in folder.groups]),
        missing=markdown.missing_runs(folder),
        environment=environments(folder),
    )
    write_text(place / "README.md", text)


def width(group: Group) -> int:
    """The D of a group, which its name tells."""
    return int(group.point.partition("=d")[2])


def arms_part(group: Group) -> str:
    name = group.point.partition("=")[2]
    figure = f"![held-out loss at width {width(group)}](figures/loss-{name}.svg)\n\n" if any(
        run.evaluations for run in group.runs
    ) else ""  # fmt: skip
    return f"### Width {width(group)}\n\n{figure}{markdown.arms_table(group, compare(group))}"


def widths_table(folder: Folder) -> str:
    columns = ["width", "parameters", f"`{BASELINE}`", *(f"`{arm}` minus `{other}`" for arm, other in PAIRS)]
    rows = []
    for group in folder.groups:
        baseline = next(arm for arm in compare(group).arms if arm.is_baseline)
        differences = (markdown.with_error(markdown.paired(group, *pair), signed=True) for pair in PAIRS)
        found = disagreement(group)
        cells = [decimals(found[key]) if found else ABSENT for key in ("kl", "null", "excess")]
        mean = loss(baseline.loss.mean) if baseline.loss else ABSENT
        rows.append([str(width(group)), count(baseline.parameters), mean, *differences, *cells])
    return markdown.table([*columns, "disagreement of H = 1", "null", "excess"], rows)


def disagreement(group: Group) -> Mapping[str, float] | None:
    """The readings of the probed H = 1 models, means over their seeds."""
    found: list[Any] = [probe.disagreement["contiguous"] for probe in markdown.probes_of(group, ONE)]
    return {key: fmean(one[key] for one in found) for key in ("kl", "null", "excess")} if found else None


def readings_part(folder: Folder, readings: Sequence[Mapping[str, Any]]) -> str:
    parts = []
    for group in folder.groups:
        mine = [one for one in readings if one["point"].get("width") == group.point.partition("=")[2]]
        parts += [f"Width {width(group)}", markdown.readings_table(mine, group.arms), markdown.seeds_of(mine)]
    return "\n\n".join(filter(None, parts))


@styled
def against_width(folder: Folder) -> Figure | None:
    """The paired differences against width, with their standard errors; None without any."""
    colours = strokes([f"{arm} minus {other}" for arm, other in PAIRS[:3]], None)
    figure, axes = wide("width", "difference in held-out loss")
    axes.axhline(0, color="#85878a", linewidth=1.0)
    axes.set_xticks([width(group) for group in folder.groups])
    for (arm, other), (name, stroke) in zip(PAIRS, colours.items(), strict=False):
        found = [(width(group), markdown.paired(group, arm, other)) for group in folder.groups]
        known = [(D, one.mean, one.standard_error or 0.0) for D, one in found if one is not None]
        if known:
            D, means, errors = zip(*known, strict=True)
            axes.errorbar(D, means, errors, color=stroke.colour, marker="o", capsize=3, label=name)
    if len(axes.containers) == 0:
        return None
    legend(figure, axes)
    return figure


def third_seed() -> Iterator[str]:
    """What study A says at width 512, where it has a seed more."""
    group = read_folder(STUDY_A / "results").groups[0]
    found = markdown.paired(group, KV, ONE)
    if found is not None and found.n > 2:
        yield (
            f"Two seeds say little: with the third one of [study A](../{STUDY_A.name}) H = 4 minus H = 1 is "
            f"{markdown.with_error(found, signed=True)} at width 512."
        )


def statement(folder: Folder) -> Iterator[str]:
    means = {}
    for group in folder.groups:
        found = markdown.paired(group, KV, ONE)
        if found is None:
            yield f"Width {width(group)}: no pair of H = 4 and H = 1 is finished."
            continue
        means[width(group)] = found.mean
        yield f"Width {width(group)}: H = 4 minus H = 1 is {markdown.with_error(found, signed=True)}. {settled(found)}"
    yield from third_seed()
    if len(means) > 1:
        falls = all(a > b for a, b in zip(list(means.values()), list(means.values())[1:], strict=False))
        yield (
            f"From width {min(means)} to {max(means)} the advantage of several heads "
            + ("grows at every step of width." if falls else "does not grow at every step of width.")
            + " The paper's grows from 512 to 768."
        )
    probed = {width(group): found["excess"] for group in folder.groups if (found := disagreement(group))}
    if probed:
        yield "The excess disagreement of the slices of H = 1: " + ", ".join(
            f"{excess:.3f} at width {D}" for D, excess in probed.items()
        ) + "."  # fmt: skip
    for group in folder.groups:
        yield from (f"Width {width(group)}: {caution}" for caution in compare(group).cautions)


if __name__ == "__main__":
    places = [*map(Path, sys.argv[1:]), HERE, STUDY_A]
    main(places[0], places[1] if len(sys.argv) > 2 else STUDY_A)
