"""What a study shows while it runs: a live table on a terminal, elsewhere a line for each start and end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from depthroute.studies import results
from depthroute.studies.scheduling import Slot
from depthroute.studies.study import Run, Study
from depthroute.training.callbacks import read_metrics

_REFRESH_S = 2.0


class LiveTable:
    """A context in which the ends of runs are shown as they come; it reads run folders and changes nothing."""

    def __init__(self, study: Study, runs: Sequence[Run], out: Path, console: Console) -> None:
        self.study = study
        self.runs = runs
        self.out = out
        self.console = console
        self._running: dict[str, str] = {}  # run -> slot
        self._elsewhere: set[str] = set()
        self._shown = 0.0
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> LiveTable:
        if self._live:
            self._live.start()
        else:
            done = sum(results.state(self.out, run)[0] == results.FINISHED for run in self.runs)
            self._say(f"{self.study.name}: {len(self.runs)} runs, {done} of them finished before")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._refresh()
            self._live.stop()

    def started(self, run: Run, slot: Slot) -> None:
        self._running[run.name] = slot.name
        self._say(f"{run.name} started on {slot.name}")

    def ended(self, run: Run, *, elsewhere: bool) -> None:
        self._running.pop(run.name, None)
        if elsewhere:
            self._elsewhere.add(run.name)
        row = self._row(run)
        self._say(f"{run.name} {row[1]}  {row[2]}  held-out loss {row[3]}  {row[4]} tokens/s".rstrip())

    def tick(self, running: Mapping[Slot, Run]) -> None:
        if self._live and time.monotonic() - self._shown > _REFRESH_S:
            self._refresh()

    def _say(self, line: str) -> None:
        if not self._live:
            self.console.print(line, soft_wrap=True, highlight=False, markup=False)

    def _refresh(self) -> None:
        assert self._live is not None
        self._shown = time.monotonic()
        rows = [self._row(run) for run in self.runs]
        first = {"running": 0, "failed": 1, "finished": 2}
        begun = sorted(
            (row for row in rows if row[1] != results.NOT_STARTED), key=lambda row: first.get(row[1].split(":")[0], 3)
        )
        done = sum(row[1] == results.FINISHED for row in rows)
        table = Table(
            title=escape(f"{self.study.name}: {done} of {len(rows)} runs finished"),
            caption=f"{len(rows) - len(begun)} not started",
        )
        for column in ("run", "state", "steps", "held-out loss", "tokens/s"):
            table.add_column(column, justify="left" if column in ("run", "state") else "right")
        for row in begun:
            table.add_row(*map(escape, row))
        self._live.update(table, refresh=True)

    def _row(self, run: Run) -> tuple[str, str, str, str, str]:
        state, reason = results.state(self.out, run)
        if run.name in self._running:
            state = "running"
        elif run.name in self._elsewhere and state != results.FINISHED:
            state = "running elsewhere"
        lines = read_metrics(results.run_folder(self.out, run) / "metrics.jsonl")
        trained, evaluated = _last(lines, "train"), _last(lines, "evaluation")
        return (
            run.name,
            f"{state}: {reason}" if reason else state,
            f"{max((line['step'] for line in lines), default=0):,}/{run.recipe.training.steps:,}",
            f"{evaluated['loss']:.4f}" if evaluated else "-",
            f"{trained['tokens_per_second']:,.0f}" if trained else "-",
        )


def _last(lines: Sequence[Mapping[str, Any]], kind: str) -> Mapping[str, Any] | None:
    return next((line for line in reversed(lines) if line["kind"] == kind), None)
