"""A dry run: what a study needs before anything is run (tokens, FLOPs, GPU hours, disc)."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from depthroute import residual as schemes
from depthroute.files import new_folder
from depthroute.models.presets import decoder_config
from depthroute.residual.options import route_heads
from depthroute.studies import results
from depthroute.studies.flops import (
    TokenFlops,
    count_parameters,
    recipe_decoder,
    recipe_flops,
    token_flops,
    why_not_counted,
)
from depthroute.studies.grid import check_only, check_reuse
from depthroute.studies.scheduling import free_slots
from depthroute.studies.study import Run, load_study, runs
from depthroute.terminal import show
from depthroute.training.recipe import Recipe

# Training of seed 1 in this record, whose shape `_measured_rates` builds: additive, and mhar with one route head and
# with four. What a token takes is then estimated as its FLOPs without routing at the first speed, and its routing FLOPs
# at what the second one (schemes without heads too) or the third one is slower.
RECORD = "records/2026-11-29_study-a"
ADDITIVE_TOKENS_PER_SECOND, ONE_HEAD_TOKENS_PER_SECOND, HEADS_TOKENS_PER_SECOND = 705_671, 582_340, 602_502
ESTIMATE = (
    "estimated from three measurements on one H200, so the hours are of one H200 and not of this machine "
    f"({RECORD}, bf16, compiled, the 100M shape with 2,048 tokens: {ADDITIVE_TOKENS_PER_SECOND:,} tokens/s additive, "
    f"{HEADS_TOKENS_PER_SECOND:,} mhar with four heads, {ONE_HEAD_TOKENS_PER_SECOND:,} with one), the weights and "
    "attention scaled by their FLOPs and the routing by its own; schemes without fused kernels are slower"
)

# Bytes for each parameter: fp32 weights, and beside them in a checkpoint the two moments of AdamW.
_FINAL_BYTES, _CHECKPOINT_BYTES, _KEPT_CHECKPOINTS = 4, 12, 2
_NAMED = 3  # so many rows that a total is without are named; of more, their number is told


@dataclass(frozen=True)
class PlannedRuns:
    """The runs of one arm at one point of the grid; all but `seeds` and `hours` is for one run.

    None is what is not known: of a checkpoint that is not here all that depends on its model, of a scheme whose FLOPs
    are not counted these and the estimate of its speed. `unknown` says why.
    """

    label: str
    seeds: int
    parameters: int | None
    steps: int
    tokens: int
    flops: float | None
    tokens_per_second: float | None
    unknown: str = ""

    @property
    def counted(self) -> bool:
        """Whether its FLOPs are known."""
        return self.flops is not None

    @property
    def hours(self) -> float | None:
        """GPU hours of training of all seeds, without start-up and evaluation."""
        return self.seeds * self.tokens / self.tokens_per_second / 3600 if self.tokens_per_second else None

    @property
    def disc_bytes(self) -> int | None:
        """What stays of all seeds: the final models."""
        return None if self.parameters is None else self.seeds * self.parameters * _FINAL_BYTES


@dataclass(frozen=True)
class Plan:
    """What a study needs, row by row and in all; a total is over the rows where its number is known."""

    name: str
    rows: tuple[PlannedRuns, ...]
    speed_source: str

    @property
    def num_runs(self) -> int:
        return sum(row.seeds for row in self.rows)

    @property
    def tokens(self) -> int:
        return sum(row.seeds * row.tokens for row in self.rows)

    @property
    def flops(self) -> float:
        return sum(row.seeds * (row.flops or 0.0) for row in self.rows)

    @property
    def hours(self) -> float:
        return sum(row.hours or 0.0 for row in self.rows)

    @property
    def disc_bytes(self) -> int:
        return sum(row.disc_bytes or 0 for row in self.rows)

    @property
    def running_disc_bytes(self) -> int:
        """What one run needs beside that while it trains: its checkpoints."""
        return max(row.parameters or 0 for row in self.rows) * _CHECKPOINT_BYTES * _KEPT_CHECKPOINTS

    def __str__(self) -> str:
        terminal = Console()
        console = Console(
            width=max(terminal.width, 120), force_terminal=terminal.is_terminal, file=io.StringIO(), record=True
        )
        show(self.table(), console)
        return console.export_text()

    def table(self) -> Table:
        """The plan for people; its text is `str(plan)`."""
        title = f"{self.name}: {self.num_runs} run{'s' if self.num_runs > 1 else ''}"
        table = Table(title=escape(title), caption=escape(self._caption()), caption_justify="left")
        columns = (
            "arm",
            "seeds",
            "parameters",
            "steps",
            "tokens a run",
            "FLOPs a run",
            "tokens/s",
            "GPU hours",
            "disc",
        )
        for name in columns:
            # Where a line is bounded, a name goes on in the next one: cut names would look alike.
            table.add_column(name, justify="left" if name == "arm" else "right", overflow="fold")
        for row in self.rows:
            table.add_row(
                row.label,
                str(row.seeds),
                _known(row.parameters, _short),
                f"{row.steps:,}",
                _short(row.tokens),
                _known(row.flops, lambda flops: f"{flops:.2e}"),
                _known(row.tokens_per_second, lambda speed: f"{speed:,.0f}"),
                _known(row.hours, lambda hours: f"{hours:,.2f}"),
                _known(row.disc_bytes, _bytes),
            )
        return table

    def _caption(self) -> str:
        flops = self._total(f"{self.flops:.2e}", "FLOPs", [row.flops for row in self.rows])
        hours = self._total(f"{self.hours:,.1f}", "GPU hours", [row.hours for row in self.rows])
        disc = self._total(_bytes(self.disc_bytes), "of final models", [row.disc_bytes for row in self.rows])
        running = _bytes(self.running_disc_bytes) if self.disc_bytes else "?"
        lines = [
            f"In all {_short(self.tokens)} tokens, {flops} and {hours} of training (start-up and evaluation come on "
            f"top); {disc}, and for the checkpoints of each run while it trains {running}."
        ]
        for reason in dict.fromkeys(row.unknown for row in self.rows if row.unknown):
            lines.append(f"?: {reason} ({self._names([row for row in self.rows if row.unknown == reason])}).")
        if self.hours:
            lines.append(f"Speed: {self.speed_source}.")
        return "\n".join(lines)

    def _total(self, number: str, unit: str, parts: Sequence[float | None]) -> str:
        """A total and the rows that it lacks; "?" where it lacks all."""
        lacking = [row for row, part in zip(self.rows, parts, strict=True) if part is None]
        if len(lacking) == len(self.rows):
            return f"? {unit}"
        return f"{number} {unit}" + (f" (without {self._names(lacking)})" if lacking else "")

    def _names(self, rows: Sequence[PlannedRuns]) -> str:
        if len(rows) > _NAMED:
            return f"{len(rows)} of the {len(self.rows)} rows"
        return ", ".join(row.label for row in rows)


def plan(
    source: str | Path | Mapping[str, Any],
    rate: float | None = None,
    overrides: Iterable[str] = (),
    *,
    only: Collection[str] = (),
    workers: int | None = None,
    reuse: Sequence[str | Path] = (),
    out: str | Path | None = None,
) -> Plan:
    """What a study needs. Starts nothing, writes nothing and reads no data.

    `rate`, in tokens a second, is taken for every run where it is given; otherwise each run's speed is an estimate
    (`ESTIMATE` says from what). `only`: these arms alone. `workers`, `reuse` and `out` change nothing in the plan, but
    what `run_study` would refuse of them is refused here too.
    Raises what `run_study` raises, and ValueError for a speed that is not positive.
    """
    if rate is not None and not 0 < rate < math.inf:
        raise ValueError(f"rate: got {rate:g}, wants a positive number of tokens a second")
    study = load_study(source, overrides)
    wanted = runs(study)
    check_only(study, only)
    check_reuse(reuse)
    if out is not None:
        results.check_place(new_folder(out, "out"), wanted)
    if workers is not None:  # a plan alone asks for no device, so that all of them may be in use
        free_slots(workers)
    by_label: dict[str, list[Run]] = {}
    for run in wanted:
        if not only or run.arm in only:
            by_label.setdefault(run.label, []).append(run)
    costs: dict[str, _Cost] = {}
    rows = tuple(_planned(group, rate, costs) for group in by_label.values())
    return Plan(study.name, rows, ESTIMATE if rate is None else f"{rate:,.0f} tokens/s as given")


@dataclass(frozen=True)
class _Cost:
    """What one token of a recipe costs; None is what is not known, for the reason `unknown`."""

    parameters: int | None
    flops: float | None
    tokens_per_second: float | None
    unknown: str = ""


def _planned(group: list[Run], rate: float | None, costs: dict[str, _Cost]) -> PlannedRuns:
    recipe, tokens = group[0].recipe, group[0].tokens
    key = json.dumps([recipe.model.model_dump(), recipe.data.tokenizer, recipe.residual, recipe.data.sequence_length])
    if key not in costs:
        costs[key] = _cost(recipe)
    cost = costs[key]
    return PlannedRuns(
        label=group[0].label,
        seeds=len(group),
        parameters=cost.parameters,
        steps=recipe.training.steps,
        tokens=tokens,
        flops=None if cost.flops is None else cost.flops * tokens,
        tokens_per_second=rate or cost.tokens_per_second,
        unknown=cost.unknown,
    )


def _cost(recipe: Recipe) -> _Cost:
    decoder, flops = recipe_decoder(recipe), recipe_flops(recipe)
    if flops is None:
        parameters = None if decoder is None else count_parameters(decoder, recipe.residual)
        return _Cost(parameters, None, None, why_not_counted(recipe))
    heads = route_heads(schemes.resolve(recipe.residual, decoder).get("num_heads", 1), decoder)
    return _Cost(flops.parameters, flops.total, _estimated_speed(flops, heads))


def _known(number: Any, text: Callable[[Any], str]) -> str:
    return "?" if number is None else text(number)


def _bytes(number: float) -> str:
    return f"{_short(number, 'G')}B"


def _short(number: float, billion: str = "B") -> str:
    for unit, suffix in ((1e9, billion), (1e6, "M"), (1e3, "K")):
        if number >= unit:
            return f"{number / unit:,.1f} {suffix}"
    return f"{number:,.0f}"


@cache
def _measured_rates() -> tuple[float, float, float]:
    """FLOPs a second of weights and attention, of routing with one head, and of routing with more."""
    flops = token_flops(decoder_config("100m", vocab_size=50304), {"scheme": "mhar"}, sequence_length=2048)
    one, more = (
        flops.routing / (1 / speed - 1 / ADDITIVE_TOKENS_PER_SECOND)
        for speed in (ONE_HEAD_TOKENS_PER_SECOND, HEADS_TOKENS_PER_SECOND)
    )
    return flops.baseline * ADDITIVE_TOKENS_PER_SECOND, one, more


def _estimated_speed(flops: TokenFlops, heads: int) -> float:
    dense, one_head, more_heads = _measured_rates()
    return 1 / (flops.baseline / dense + flops.routing / (one_head if heads == 1 else more_heads))
