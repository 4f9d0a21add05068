"""What a run writes and shows while it goes: metrics.jsonl, and a line of progress."""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from depthroute.files import write_text
from depthroute.training.meter import Meter, synchronize

HELD_OUT = "held_out.jsonl"


class LogBeforeSave(TrainerCallback):
    """A log line at every step that is saved, so that no mean loss spans a resume.

    A run that was killed then logs the same numbers as one that was not. For every rank: all take part in a log line.
    """

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if control.should_save:
            control.should_log = True


class MetricsWriter(TrainerCallback):
    """Appends a line to metrics.jsonl for each log and each evaluation, and one to held_out.jsonl beside it.

    A line of kind "train" has the mean loss since the line before, the rate and the gradient norm of its step, and
    what `Meter.read` says, and where there are several `devices` what it says of each. A line of kind "evaluation" has
    the seconds that the evaluation took, and where the scheme has gates or queries a line of kind "residual" says where
    these stand. A line of held_out.jsonl has the loss of each held-out sequence, so that two runs can be compared
    sequence by sequence.
    A resumed run first takes back the lines after its checkpoint, so no step stands there twice.
    """

    def __init__(self, path: Path, tokens_per_step: int, meter: Meter, started: float) -> None:
        self.path = path
        self.tokens_per_step = tokens_per_step
        self.meter = meter
        self.started = started
        self.seconds_to_first_step: float | None = None
        self._files: dict[Path, TextIO] = {}

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        # A run that begins anew evaluates before its first step anew.
        last = state.global_step or -1
        kept = truncate_metrics(self.path, last)
        truncate_metrics(self.path.with_name(HELD_OUT), last)
        seconds = next((line["seconds"] for line in reversed(kept) if line["kind"] == "train"), 0.0)
        self.meter.start(state.global_step * self.tokens_per_step, seconds)
        self._files = {path: path.open("a", encoding="utf-8") for path in (self.path, self.path.with_name(HELD_OUT))}

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.seconds_to_first_step is None:
            synchronize()
            self.seconds_to_first_step = time.perf_counter() - self.started

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
    ) -> None:
        if "loss" in logs:
            self._write(
                kind="train",
                step=state.global_step,
                tokens=logs["tokens"],
                loss=logs["loss"],
                lr=logs["learning_rate"],
                grad_norm=logs["grad_norm"],
                tokens_per_second=logs["tokens_per_second"],
                peak_memory_bytes=logs["peak_memory_bytes"],
                seconds=logs["seconds"],
                **({"devices": self.meter.devices} if self.meter.devices else {}),
            )

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any = None, **_: Any
    ) -> None:
        place = {"step": state.global_step, "tokens": state.global_step * self.tokens_per_step}
        averaged = {key: metrics[f"eval_{key}"] for key in ("ema_loss", "ema_stderr") if f"eval_{key}" in metrics}
        self._write(
            kind="evaluation",
            **place,
            loss=metrics["eval_loss"],
            stderr=metrics["eval_stderr"],
            **averaged,
            num_tokens=metrics["eval_num_tokens"],
            seconds=metrics["eval_seconds"],
        )
        if any(metrics["readings"].values()):
            self._write(kind="residual", **place, **metrics["readings"])
        losses = {key: [round(loss, 6) for loss in values] for key, values in metrics["sequences"].items()}
        self._append(self.path.with_name(HELD_OUT), {"step": state.global_step, **losses})

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _write(self, **line: Any) -> None:
        self._append(self.path, line)

    def _append(self, path: Path, line: dict[str, Any]) -> None:
        file = self._files[path]  # there once the training has begun
        file.write(json.dumps(line) + "\n")
        file.flush()


class ProgressLine(TrainerCallback):
    """Loss, tokens per second and time left: a bar on a terminal, elsewhere a line for each evaluation."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.console = Console(stderr=True)
        self.progress = Progress(
            TextColumn(f"{name} {{task.fields[shown]}}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
        )
        self._loss = self._held_out = self._speed = "-"
        self._begin = (0, 0.0)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._begin = (state.global_step, time.perf_counter())
        if state.global_step:
            print(f"{self.name}  goes on after step {state.global_step}/{state.max_steps}", file=sys.stderr, flush=True)
        self._task = self.progress.add_task(self.name, total=state.max_steps, completed=state.global_step, shown="")
        self.progress.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.progress.update(self._task, completed=state.global_step, shown=self._shown())

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any
    ) -> None:
        if "loss" in logs:
            self._loss, self._speed = f"{logs['loss']:.3f}", f"{logs['tokens_per_second']:,.0f}"

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any = None, **_: Any
    ) -> None:
        self._held_out = f"{metrics['eval_loss']:.3f}"
        if not self.console.is_terminal:
            place = f"step {state.global_step}/{state.max_steps}"
            print(
                f"{self.name}  {place}  {self._shown()}{self._left(state)}",
                file=sys.stderr,
                flush=True,
            )

    def close(self) -> None:
        self.progress.stop()

    def _left(self, state: TrainerState) -> str:
        step, since = self._begin
        done = state.global_step - step
        if not done:
            return ""
        left = (state.max_steps - state.global_step) * (time.perf_counter() - since) / done
        return f"  {timedelta(seconds=round(left))} left"

    def _shown(self) -> str:
        return f"loss {self._loss}  held-out {self._held_out}  {self._speed} tokens/s"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl or held_out.jsonl; one that a kill has cut off is left out."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def truncate_metrics(path: Path, step: int) -> list[dict[str, Any]]:
    """Take the lines after `step` out of such a file, and return the others."""
    kept = [line for line in read_metrics(path) if line["step"] <= step]
    write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
    return kept
