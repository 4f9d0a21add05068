"""A dry run: what a study needs before anything is run (tokens, FLOPs, GPU hours, disc)."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from depthroute.models.presets import decoder_config
from depthroute.studies.flops import TokenFlops, recipe_flops, token_flops
from depthroute.studies.study import Run, load_study, runs

# Two speeds measured with prototype kernels on one H200, bf16, compiled: the 100M shape with 50,257 words and 2,048
# tokens, additive and mhar with one route head. What a token takes is then estimated as its FLOPs without routing at
# the first speed, and its routing FLOPs at what the second one is slower.
_ADDITIVE_TOKENS_PER_SECOND, _MHAR_TOKENS_PER_SECOND = 805_000, 631_000
ESTIMATE = (
    "estimated from two measurements on one H200 (bf16, compiled, the 100M shape with 50,257 words and 2,048 tokens, "
    f"prototype kernels: {_ADDITIVE_TOKENS_PER_SECOND:,} tokens/s additive, {_MHAR_TOKENS_PER_SECOND:,} mhar), the "
    "weights and attention scaled by their FLOPs and the routing by its own; schemes without fused kernels are slower"
)

# Bytes for each parameter: fp32 weights, and beside them in a checkpoint the two moments of AdamW.
_FINAL_BYTES, _CHECKPOINT_BYTES, _KEPT_CHECKPOINTS = 4, 12, 2


@dataclass(frozen=True)
class PlannedRuns:
    """The runs of one arm at one point of the grid; all but `seeds` and `hours` is for one run."""

    label: str
    seeds: int
    parameters: int
    steps: int
    tokens: int
    flops: float
    tokens_per_second: float

    @property
    def counted(self) -> bool:
        """False for a checkpoint that is not on this machine: its parameters and FLOPs stand as 0."""
        return self.parameters > 0

    @property
    def hours(self) -> float:
        """GPU hours of training of all seeds, without start-up and evaluation; 0 where no speed is known."""
        return self.seeds * self.tokens / self.tokens_per_second / 3600 if self.tokens_per_second else 0.0

    @property
    def disc_bytes(self) -> int:
        """What stays of all seeds: the final models."""
        return self.seeds * self.parameters * _FINAL_BYTES


@dataclass(frozen=True)
class Plan:
    """What a study needs, row by row and in all."""

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
        return sum(row.seeds * row.flops for row in self.rows)

    @property
    def hours(self) -> float:
        return sum(row.hours for row in self.rows)

    @property
    def disc_bytes(self) -> int:
        return sum(row.disc_bytes for row in self.rows)

    @property
    def running_disc_bytes(self) -> int:
        """What one run needs beside that while it trains: its checkpoints."""
        return max(row.parameters for row in self.rows) * _CHECKPOINT_BYTES * _KEPT_CHECKPOINTS

    def __str__(self) -> str:
        console = Console(width=max(Console().width, 120), file=io.StringIO(), record=True)
        console.print(self.table())
        return console.export_text()

    def table(self) -> Table:
        """The plan for people; its text is `str(plan)`."""
        table = Table(title=f"{self.name}: {self.num_runs} runs", caption=self._caption(), caption_justify="left")
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
            table.add_column(name, justify="left" if name == "arm" else "right")
        for row in self.rows:
            table.add_row(
                row.label,
                str(row.seeds),
                _short(row.parameters) if row.counted else "?",
                f"{row.steps:,}",
                _short(row.tokens),
                f"{row.flops:.2e}" if row.counted else "?",
                f"{row.tokens_per_second:,.0f}" if row.tokens_per_second else "?",
                f"{row.hours:,.2f}" if row.tokens_per_second else "?",
                f"{_short(row.disc_bytes, 'G')}B" if row.counted else "?",
            )
        return table

    def _caption(self) -> str:
        if not all(row.counted for row in self.rows):
            return f"In all {_short(self.tokens)} tokens. ?: of a checkpoint that is not on this machine."
        return (
            f"In all {_short(self.tokens)} tokens, {self.flops:.2e} FLOPs and {self.hours:,.1f} GPU hours of "
            f"training (start-up and evaluation come on top); {_short(self.disc_bytes, 'G')}B of final models, and for "
            f"the checkpoints of each run while it trains {_short(self.running_disc_bytes, 'G')}B.\n"
            f"Speed: {self.speed_source}."
        )


def plan(
    source: str | Path | Mapping[str, Any], tokens_per_second: float | None = None, overrides: Iterable[str] = ()
) -> Plan:
    """What a study needs. Starts nothing and reads no data.

    `tokens_per_second` is taken for every run where it is given; otherwise each run's speed is an estimate (`ESTIMATE`
    says from what).
    Raises what `load_study` and `runs` raise, and ValueError for a speed that is not positive.
    """
    if tokens_per_second is not None and not tokens_per_second > 0:
        raise ValueError(f"tokens_per_second: got {tokens_per_second}, wants a positive speed")
    study = load_study(source, overrides)
    by_label: dict[str, list[Run]] = {}
    for run in runs(study):
        by_label.setdefault(run.label, []).append(run)
    counted: dict[str, TokenFlops | None] = {}
    rows = tuple(_planned(group, tokens_per_second, counted) for group in by_label.values())
    return Plan(
        study.name, rows, ESTIMATE if tokens_per_second is None else f"{tokens_per_second:,.0f} tokens/s as given"
    )


def _planned(group: list[Run], tokens_per_second: float | None, counted: dict[str, TokenFlops | None]) -> PlannedRuns:
    recipe = group[0].recipe
    key = json.dumps([recipe.model.model_dump(), recipe.data.tokenizer, recipe.residual, recipe.data.sequence_length])
    if key not in counted:
        counted[key] = recipe_flops(recipe)
    flops = counted[key]
    return PlannedRuns(
        label=group[0].label,
        seeds=len(group),
        parameters=flops.parameters if flops else 0,
        steps=recipe.training.steps,
        tokens=group[0].tokens,
        flops=flops.total * group[0].tokens if flops else 0.0,
        tokens_per_second=tokens_per_second or (_estimated_speed(flops) if flops else 0.0),
    )


def _short(number: float, billion: str = "B") -> str:
    for unit, suffix in ((1e9, billion), (1e6, "M"), (1e3, "K")):
        if number >= unit:
            return f"{number / unit:,.1f} {suffix}"
    return f"{number:,.0f}"


@cache
def _measured_rates() -> tuple[float, float]:
    """FLOPs a second of weights and attention, and of routing."""
    flops = token_flops(decoder_config("100m", vocab_size=50257), {"scheme": "mhar"}, sequence_length=2048)
    seconds_of_routing = 1 / _MHAR_TOKENS_PER_SECOND - 1 / _ADDITIVE_TOKENS_PER_SECOND
    return flops.baseline * _ADDITIVE_TOKENS_PER_SECOND, flops.routing / seconds_of_routing


def _estimated_speed(flops: TokenFlops) -> float:
    dense, routing = _measured_rates()
    return 1 / (flops.baseline / dense + flops.routing / routing)
