"""Whole training steps: forward, backward, clip, AdamW. Schemes side by side, their steps interleaved.

    python -m depthroute.bench.train --out DIR --preset 100m [350m ...] [--batch 8] [--length 2048]
        [--schemes additive mhar] [--precision bf16 autocast] [--eager | --graphs] [--microbatches 1] [--processes]
        [--overrides num_hidden_layers=4]

`bf16` holds weights, gradients and optimizer state in bf16; `autocast` holds them in fp32 and computes in bf16. The
table gives tokens a second beside the first scheme's, the milliseconds of a step and for how many of them the GPU was
busy, peak memory, and the seconds from a built model to the end of its first step. Where a step takes much longer than
the GPU is busy, it waits for launches from Python; `--graphs` replays them as CUDA graphs. train.json is there from the
first round on, and has every round that came to its end.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from depthroute.bench import timing
from depthroute.bench.arm import Job, warmed_up
from depthroute.bench.options import count, field
from depthroute.bench.together import Together
from depthroute.errors import in_one_line
from depthroute.files import new_folder, write_json

# Sequences and length of the paper's microbatch on one GPU.
MICROBATCH = {"tiny": (2, 256), "100m": (8, 2048), "124m": (8, 2048), "350m": (4, 1024), "1b": (2, 1024)}
PRECISIONS = ("bf16", "autocast")

Save = Callable[[list[dict[str, Any]]], None]


def measure(
    jobs: list[Job], *, rounds: int, steps: int, processes: bool = False, save: Save | None = None
) -> list[dict[str, Any]]:
    """One row for each job; they take turns of `steps` steps, `rounds` times, and only one is at work at a time.

    processes: each job in a process of its own, so that they compile at the same time, which makes each of their first
    steps slower than alone.
    save: told the rows there are after every round.
    """
    if processes:
        with Together(warmed_up, jobs) as together:
            arms = [Turns(partial(together.ask, i, "turn"), partial(together.ask, i, "busy")) for i in range(len(jobs))]
            return _take_turns(jobs, together.rows, arms, rounds, steps, save)
    own, rows = zip(*map(warmed_up, jobs), strict=True)
    return _take_turns(jobs, list(rows), [Turns(arm.turn, arm.busy) for arm in own], rounds, steps, save)


class Turns(NamedTuple):
    """What is asked of an arm, wherever it runs."""

    turn: Callable[[int], float]
    busy: Callable[[], float | None]


def _take_turns(
    jobs: list[Job], rows: list[dict[str, Any]], arms: list[Turns], rounds: int, steps: int, save: Save | None
) -> list[dict[str, Any]]:
    samples: list[list[float]] = []
    for _ in range(rounds):
        samples.append([arm.turn(steps) for arm in arms])
        _add_speeds(jobs, rows, samples)
        if save:
            save(rows)
    for row, arm in zip(rows, arms, strict=True):
        row["busy_ms"] = arm.busy()
    return rows


def _add_speeds(jobs: list[Job], rows: list[dict[str, Any]], samples: list[list[float]]) -> None:
    for i, (job, row, first) in enumerate(zip(jobs, rows, _firsts(jobs), strict=True)):
        own, beside = ([taken[n] for taken in samples] for n in (i, first))
        speeds = [job.tokens / seconds for seconds in own]
        row["tokens_per_second"] = {"median": statistics.median(speeds), "least": min(speeds), "most": max(speeds)}
        # Taken turn by turn, so that what the whole card does slower or faster does not count.
        row["of_first"] = statistics.median(a / b for a, b in zip(beside, own, strict=True))
        row["step_ms"] = statistics.median(own) * 1e3
        row["rounds"] = len(own)
        row["memory_of_first"] = row["peak_memory"] / max(1, rows[first]["peak_memory"])


def _firsts(jobs: list[Job]) -> list[int]:
    """For each job the place of the first one of its shape and precision, which the others are held beside."""
    places: dict[tuple[Any, ...], int] = {}
    return [places.setdefault((job.preset, job.precision, job.batch, job.length), i) for i, job in enumerate(jobs)]


def table(rows: list[dict[str, Any]]) -> str:
    """The results in a few lines."""
    names = f"{'preset':6s} {'scheme':22s} {'precision':9s}"
    speeds = f"{'tokens/s (least-most)':>27s} {'x first':>7s} {'step ms':>8s} {'busy ms':>8s}"
    lines = [f"{names} {speeds} {'GiB':>6s} {'x first':>7s} {'first s':>7s}"]
    for row in rows:
        speed = row["tokens_per_second"]
        span = f"{speed['median']:,.0f} ({speed['least']:,.0f}-{speed['most']:,.0f})"
        busy = "-" if row.get("busy_ms") is None else f"{row['busy_ms']:.2f}"
        lines.append(
            f"{row['preset']:6s} {row['scheme']:22s} {row['precision']:9s} {span:>27s} {row['of_first']:7.3f} "
            f"{row['step_ms']:8.2f} {busy:>8s} "
            f"{row['peak_memory'] / 2**30:6.2f} {row['memory_of_first']:7.3f} {row['first_step_s']:7.1f}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="depthroute bench train", description="Measure whole training steps.")
    parser.add_argument("--out", type=Path, required=True, help="folder for train.json")
    parser.add_argument("--preset", nargs="+", choices=list(MICROBATCH), default=["100m"])
    parser.add_argument("--schemes", nargs="+", default=["additive", "mhar"], help="mhar, mhar:num_heads=1, ...")
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=["bf16"])
    parser.add_argument("--batch", type=count, help="sequences of a microbatch")
    parser.add_argument("--length", type=count, help="tokens of a sequence")
    parser.add_argument("--microbatches", type=count, default=1, help="for each optimizer step")
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--steps", type=count, default=5, help="of each scheme in a round")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--eager", action="store_true", help="without torch.compile")
    how.add_argument("--graphs", action="store_true", help="replay what is compiled as CUDA graphs")
    parser.add_argument("--processes", action="store_true", help="each in a process of its own: they compile at once")
    parser.add_argument(
        "--overrides", nargs="*", type=field, default=[], metavar="FIELD=VALUE", help="of the decoder configuration"
    )
    options = parser.parse_args(arguments)
    options.out = new_folder(options.out, "--out")
    timing.require_cuda()
    jobs = [
        Job(
            preset,
            scheme,
            precision,
            options.batch or MICROBATCH[preset][0],
            options.length or MICROBATCH[preset][1],
            options.microbatches,
            compiled=not options.eager,
            graphs=options.graphs,
            overrides=dict(options.overrides),
        )
        for precision, preset, scheme in itertools.product(options.precision, options.preset, options.schemes)
    ]
    environment = timing.environment()
    rows: list[dict[str, Any]] = []
    options.out.mkdir(parents=True, exist_ok=True)

    def save(these: list[dict[str, Any]]) -> None:
        told = [{**row, "processes": options.processes} for row in (*rows, *these)]
        write_json(options.out / "train.json", {"environment": environment, "rows": told})

    for _, group in itertools.groupby(jobs, lambda job: None if options.processes else (job.precision, job.preset)):
        rows += measure(list(group), rounds=options.rounds, steps=options.steps, processes=options.processes, save=save)
        save([])
        torch._dynamo.reset()
    how_run = "eager" if options.eager else "compiled, CUDA graphs" if options.graphs else "compiled"
    print(f"{environment['device']}, {how_run}")
    print(table(rows))


if __name__ == "__main__":
    in_one_line(main)
