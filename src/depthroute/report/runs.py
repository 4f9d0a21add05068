"""Reading one run folder, finished or not, and saying what in it is missing or damaged."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import yaml

RUN_FILES = (
    "recipe.yaml",
    "environment.json",
    "metrics.jsonl",
    "held_out.jsonl",
    "read_weights.json",
    "summary.json",
)
# The kinds of lines in metrics.jsonl, with what must be a number in each.
_KINDS = {
    "evaluation": ("step", "tokens", "loss"),
    "train": ("step", "tokens", "loss"),
    "residual": ("step", "tokens"),
}
_READINGS = ("gates", "query_norms")

Lines = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Run:
    """What one run folder holds; `problems` says in one line each what could not be read."""

    arm: str
    seed: int
    folder: Path  # of a study: runs/<label>/seed-<seed>
    state: str  # "finished", "failed", "unfinished" or "not started"
    reason: str = ""
    recipe: str = ""
    environment: Mapping[str, Any] | None = None
    summary: Mapping[str, Any] | None = None
    evaluations: Lines = ()
    training: Lines = ()
    readings: Lines = ()  # `gates` and `query_norms` at each evaluation, by parameter
    # Step -> "losses", and where weights are averaged "ema_losses" -> those of the held-out sequences.
    sequence_losses: Mapping[float, Mapping[str, tuple[float, ...]]] = field(default_factory=dict)
    read_weights: Lines = ()
    problems: tuple[str, ...] = ()

    @property
    def finished(self) -> bool:
        return self.state == "finished"

    @property
    def remarks(self) -> tuple[str, ...]:
        """Why the run is not finished, and what of its folder could not be read."""
        return (*([f"{self.state}: {self.reason}"] if self.reason else []), *self.problems)

    def number(self, key: str) -> float | None:
        """A number of the summary, None where there is none."""
        value = (self.summary or {}).get(key)
        return value if _is_number(value) else None

    def files(self) -> tuple[Path, ...]:
        return tuple(path for name in RUN_FILES if (path := self.folder / name).is_file())


def read_run(folder: Path, arm: str, seed: int) -> Run:
    """One run folder, whatever state it is in; never raises for what the files hold."""
    if not folder.is_dir():
        return Run(arm, seed, folder, "not started")
    problems: list[str] = []
    summary = read_json(folder / "summary.json", dict, problems)
    if summary is not None and not _is_number(summary.get("tail_loss")):
        problems.append(f"summary.json: tail_loss is {summary.get('tail_loss')!r}; wanted a number")
        summary = None
    finished = summary is not None
    evaluations, training, readings = _read_metrics(folder / "metrics.jsonl", problems, required=finished)
    environment = read_json(folder / "environment.json", dict, problems)
    read_weights = _read_weights(folder / "read_weights.json", problems)
    recipe = read_text(folder / "recipe.yaml", problems, required=finished) or ""
    state, reason = _state(folder, summary, evaluations, training, problems)
    return Run(
        arm=arm,
        seed=seed,
        folder=folder,
        state=state,
        reason=reason,
        recipe=recipe,
        environment=environment,
        summary=summary,
        evaluations=evaluations,
        training=training,
        readings=readings,
        sequence_losses=_read_sequence_losses(folder / "held_out.jsonl", problems),
        read_weights=read_weights,
        problems=tuple(problems),
    )


def _state(
    folder: Path, summary: Any, evaluations: tuple[Any, ...], training: tuple[Any, ...], problems: list[str]
) -> tuple[str, str]:
    failure = read_json(folder / "failure.json", dict, problems)
    if summary is not None:
        return "finished", ""
    if failure is not None:
        return "failed", str(failure.get("error") or "the run recorded a failure without a reason")
    last = max((line["step"] for line in (*training, *evaluations)), default=None)
    if last is None:
        return "unfinished", "no step is recorded yet"
    return "unfinished", f"no summary.json; the last recorded step is {last:g}"


def read_text(path: Path, problems: list[str], *, required: bool = True) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if required:
            problems.append(f"{path.name}: missing")
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"{path.name}: cannot be read ({_one_line(error)})")
    return None


def read_json(path: Path, kind: type, problems: list[str]) -> Any:
    """The content of a JSON file that need not exist; None where it does not or is damaged."""
    if not path.exists():
        return None
    text = read_text(path, problems)
    if text is None:
        return None
    try:
        content = json.loads(text)
    except ValueError as error:
        problems.append(f"{path.name}: damaged ({_one_line(error)})")
        return None
    if not isinstance(content, kind):
        problems.append(f"{path.name}: holds a {type(content).__name__}; wanted a {kind.__name__}")
        return None
    return content


def _read_metrics(path: Path, problems: list[str], *, required: bool) -> tuple[Lines, Lines, Lines]:
    """Evaluations, training and readings in the order of their steps; of a step that stands there twice the last."""
    found: dict[str, dict[float, Mapping[str, Any]]] = {kind: {} for kind in _KINDS}
    for record in _read_lines(path, problems, required=required, good=_is_metric):
        if record.get("kind") in found:
            found[record["kind"]][record["step"]] = record
    evaluations, training, readings = (tuple(lines[step] for step in sorted(lines)) for lines in found.values())
    return evaluations, training, readings


def _is_metric(record: Mapping[str, Any]) -> bool:
    kind = record.get("kind")
    numbers = all(_is_number(record.get(key)) for key in _KINDS.get(str(kind), _KINDS["train"]))
    return numbers and (kind != "residual" or all(_are_numbers(record.get(key)) for key in _READINGS))


def _are_numbers(values: Any) -> bool:
    return isinstance(values, dict) and all(map(_is_number, values.values()))


def _read_sequence_losses(path: Path, problems: list[str]) -> dict[float, dict[str, tuple[float, ...]]]:
    def good(record: Mapping[str, Any]) -> bool:
        lists = [value for key, value in record.items() if key != "step"]
        numbers = all(isinstance(values, list) and all(map(_is_number, values)) for values in lists)
        return _is_number(record.get("step")) and numbers

    found = {}
    for record in _read_lines(path, problems, required=False, good=good):
        step = record.pop("step")
        found[step] = {key: tuple(losses) for key, losses in record.items()}
    return found


def _read_lines(
    path: Path, problems: list[str], *, required: bool, good: Callable[[Mapping[str, Any]], bool]
) -> list[dict[str, Any]]:
    """The objects in a file of JSON lines that are `good`; all others are damaged."""
    lines = (read_text(path, problems, required=required) or "").split("\n")
    found, damaged = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and good(record):
            found.append(record)
        else:
            damaged.append(number)
    if damaged == [len(lines)]:
        problems.append(f"{path.name}: the last line is cut off")
    elif damaged:
        problems.append(f"{path.name}: {len(damaged)} damaged line(s), the first is line {damaged[0]}")
    return found


def _read_weights(path: Path, problems: list[str]) -> tuple[Any, ...]:
    sites = read_json(path, list, problems) or []
    if all(_is_site(site) for site in sites):
        return tuple(sites)
    problems.append("read_weights.json: damaged (wanted `site`, `sources` and one row of weights for each route head)")
    return ()


def _is_site(site: Any) -> bool:
    if not isinstance(site, dict) or not isinstance(site.get("site"), int):
        return False
    sources, weights = site.get("sources"), site.get("weights")
    if not isinstance(sources, list) or not isinstance(weights, list) or not sources or not weights:
        return False
    return all(isinstance(row, list) and len(row) == len(sources) and all(map(_is_finite, row)) for row in weights)


def parse_yaml(text: str, problems: list[str] | None = None, name: str = "recipe.yaml") -> dict[str, Any]:
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        if problems is not None:
            problems.append(f"{name}: damaged ({_one_line(error)})")
        return {}
    return content if isinstance(content, dict) else {}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and isfinite(value)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
