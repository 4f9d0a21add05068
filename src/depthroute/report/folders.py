"""Reading run and study folders: which runs are to be shown, and which of them are compared with each other."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from depthroute.errors import nearest_path
from depthroute.report.evaluations import RECORD as EVALUATION_FILE
from depthroute.report.evaluations import Evaluation, read_evaluation
from depthroute.report.probes import RECORD as PROBE_FILE
from depthroute.report.probes import Probe, read_probe
from depthroute.report.runs import RUN_FILES, Run, parse_yaml, read_json, read_run, read_text

EVALUATIONS = "evaluation"  # where `depthroute evaluate` puts its results in the folder of a model or run


@dataclass(frozen=True)
class Group:
    """Runs that are compared with each other: those at one point of a study's grid, or a single run.

    `point` is "" where there is no grid, else as in "size=350m, learning_rate=0.001".
    """

    point: str
    arms: tuple[str, ...]
    baseline: str | None
    runs: tuple[Run, ...]

    def of(self, arm: str) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.arm == arm)

    def pairs(self, arm: str) -> list[tuple[Run, Run]]:
        """Finished runs of an arm, each with the finished run of the baseline of the same seed."""
        reference = {run.seed: run for run in self.runs if run.arm == self.baseline and run.finished}
        return [(run, reference[run.seed]) for run in self.of(arm) if run.finished and run.seed in reference]


@dataclass(frozen=True)
class Folder:
    """What a report is about; `problems` says in one line each what of it could not be read."""

    name: str
    path: Path
    kind: str  # "run", "study", "evaluation", "probe", or "model" with both of the last two
    groups: tuple[Group, ...]
    description: str = ""
    samples: tuple[Mapping[str, str], ...] = ()
    probes: tuple[Probe, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(run for group in self.groups for run in group.runs)

    @property
    def arms(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(arm for group in self.groups for arm in group.arms))

    def files(self) -> tuple[Path, ...]:
        """The tables that belong to the folder as a whole."""
        names = ("study.yaml", "results.csv", "results.json")
        return tuple(path for name in names if (path := self.path / name).is_file())


def read_folder(folder: str | Path) -> Folder:
    """The runs of a study folder or a run folder, finished or not, or what evaluating or probing a model left.

    Raises FileNotFoundError if there is no such folder, ValueError if it is none of these, a study without any run, or
    if all that there is to show is damaged.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"folder: {folder} is not a folder; wanted a run or study folder{nearest_path(folder)}")
    if (folder / "study.yaml").is_file() or (folder / "runs").is_dir():
        return _read_study(folder)
    if any((folder / name).is_file() for name in RUN_FILES):
        return _read_single_run(folder)
    if any((folder / name).is_file() for name in (EVALUATION_FILE, f"{EVALUATIONS}/{EVALUATION_FILE}", PROBE_FILE)):
        return _read_model(folder)
    raise ValueError(
        f"folder: {folder} is neither a run folder (it has none of {', '.join(RUN_FILES)}) "
        "nor a study folder (it has no study.yaml and no runs/), nor is there an evaluation or a probe in it "
        f"({EVALUATION_FILE}, {PROBE_FILE})"
    )


def _read_single_run(folder: Path) -> Folder:
    run = read_run(folder, folder.resolve().name, 0)
    settings: Mapping[str, Any] = run.summary or parse_yaml(run.recipe)
    seed = settings.get("seed")
    run = replace(run, arm=str(settings.get("name") or run.arm), seed=seed if isinstance(seed, int) else 0)
    problems: list[str] = []
    samples = _read_samples(folder / "samples.json", problems)
    group = Group("", (run.arm,), None, (run,))
    probes, evaluations = _findings(folder, problems, run.arm)
    return Folder(run.arm, folder, "run", (group,), "", samples, probes, evaluations, tuple(problems))


def _read_model(folder: Path) -> Folder:
    problems: list[str] = []
    probes, evaluations = _findings(folder, problems)
    if not probes and not evaluations:
        raise ValueError(f"folder: {folder} has nothing to show; {'; '.join(problems)}")
    kind = "evaluation" if not probes else "model" if evaluations else "probe"
    name = (probes or evaluations)[0].label
    return Folder(name, folder, kind, (), "", (), probes, evaluations, tuple(problems))


def _findings(folder: Path, problems: list[str], label: str = "") -> tuple[tuple[Probe, ...], tuple[Evaluation, ...]]:
    """The probe and the evaluation of one model, where there are any."""
    probe = read_probe(folder, problems, label)
    place = folder if (folder / EVALUATION_FILE).is_file() else folder / EVALUATIONS
    evaluation = read_evaluation(place, problems, label)
    return (probe,) if probe else (), (evaluation,) if evaluation else ()


def _read_study(folder: Path) -> Folder:
    problems: list[str] = []
    settings = parse_yaml(read_text(folder / "study.yaml", problems) or "", problems, "study.yaml")
    places = dict.fromkeys(_places(settings)) | dict.fromkeys(_present(folder / "runs"))
    baseline = None if settings.get("baseline") is None else str(settings["baseline"])
    if baseline is not None and baseline not in {arm for arm, _, _ in places}:
        problems.append(f"study.yaml: the baseline {baseline!r} is not one of the arms")
    groups = []
    for point in dict.fromkeys(point for _, point, _ in places):
        here = [(arm, seed) for arm, other, seed in places if other == point]
        arms = tuple(dict.fromkeys(arm for arm, _ in here))
        runs = tuple(
            read_run(folder / "runs" / (f"{arm},{point}" if point else arm) / f"seed-{seed}", arm, seed)
            for wanted in arms
            for arm, seed in sorted(pair for pair in here if pair[0] == wanted)
        )
        groups.append(Group(point.replace(",", ", "), arms, baseline if baseline in arms else None, runs))
    if not groups:
        raise ValueError("; ".join([f"folder: {folder} names no arm and holds no run", *problems]))
    samples = _read_samples(folder / "samples.json", problems)
    name = str(settings.get("name") or folder.resolve().name)
    description = str(settings.get("description") or "")
    probes, evaluations = _findings(folder, problems)
    for found in _findings_of_arms(groups, problems):
        probes, evaluations = probes + found[0], evaluations + found[1]
    return Folder(name, folder, "study", tuple(groups), description, samples, probes, evaluations, tuple(problems))


def _findings_of_arms(
    groups: Iterable[Group], problems: list[str]
) -> Iterator[tuple[tuple[Probe, ...], tuple[Evaluation, ...]]]:
    """The probe and the evaluation of the first seed of each arm that has one."""
    for group in groups:
        for arm in group.arms:
            label = f"{arm}, {group.point}" if group.point else arm
            probes: tuple[Probe, ...] = ()
            evaluations: tuple[Evaluation, ...] = ()
            for run in group.of(arm):
                here: list[str] = []
                found = _findings(run.folder, here, f"{label}, seed {run.seed}")
                probes, evaluations = probes or found[0], evaluations or found[1]
                problems += [f"{arm}/seed-{run.seed}/{problem}" for problem in here]
            yield probes, evaluations


def _places(settings: Mapping[str, Any]) -> Iterator[tuple[str, str, int]]:
    """Arm, point and seed of every run that a study.yaml asks for; the point as it stands in the folder's name."""
    arms, seeds, grid, arm_seeds = (settings.get(key) for key in ("arms", "seeds", "grid", "arm_seeds"))
    axes = [
        [re.sub(r"[^\w.+=-]", "_", f"{str(axis).rpartition('.')[2]}={value}") for value in values]
        for axis, values in (grid if isinstance(grid, dict) else {}).items()
        if isinstance(values, list | dict)
    ]
    for point in itertools.product(*axes):
        for arm in arms if isinstance(arms, list | dict) else ():
            own = arm_seeds.get(arm) if isinstance(arm_seeds, dict) else None
            for seed in own or (seeds if isinstance(seeds, list) else ()):
                if isinstance(seed, int):
                    yield str(arm), ",".join(point), seed


def _present(runs: Path) -> Iterator[tuple[str, str, int]]:
    """Arm, point and seed of every run folder that is there."""
    for folder in sorted(runs.glob("*/seed-*")):
        seed = folder.name.removeprefix("seed-")
        if folder.is_dir() and seed.isdecimal():
            arm, _, point = folder.parent.name.partition(",")
            yield arm, point, int(seed)


def _read_samples(path: Path, problems: list[str]) -> tuple[Mapping[str, str], ...]:
    content = read_json(path, object, problems)
    samples = content if isinstance(content, list) else [] if content is None else [content]
    good = [sample for sample in samples if isinstance(sample, dict) and isinstance(sample.get("text"), str)]
    if len(good) < len(samples):
        problems.append("samples.json: damaged (wanted objects with `arm`, `prompt` and `text`)")
    return tuple({key: str(sample.get(key) or "") for key in ("arm", "prompt", "text")} for sample in good)
