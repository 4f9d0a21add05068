"""Study files: arms x grid x seeds over one recipe, in strict YAML, and the runs that they describe."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, PrivateAttr, ValidationError

from depthroute.errors import nearest
from depthroute.training import strict_yaml
from depthroute.training.recipe import Recipe, Section, load_recipe
from depthroute.training.shipped import find_recipe

Overrides = dict[str, Any]
Scalar = bool | int | float | str | None
# What the study decides for every run, so that no arm may.
_OF_THE_STUDY = ("name", "seed", "base")
# Arms are compared on the same tokens in the same order; other data are an axis of the grid.
_SHARED_BY_ARMS = ("data",)
_FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
# What may be of several types: pydantic tells a fault for each of them, and names the type as if it were a key.
_WANTED_RECIPE = "the name of a recipe or a mapping of keys to values"
_WANTED_AXIS = "a list of values or a mapping of names to the keys that each changes"


class Study(Section):
    """A comparison: every arm, at every point of the grid, with every seed; differences are taken seed by seed."""

    name: str = Field(min_length=1)
    description: str = ""
    recipe: (
        str | dict[str, Any]
    )  # what all runs share: a recipe file (or a shipped one's name), or nested or dotted keys
    arms: dict[str, Overrides]  # what an arm changes in it: nested or dotted keys
    baseline: str  # the arm that the others are set against
    seeds: list[int]
    arm_seeds: dict[str, list[int]] = Field(default_factory=dict)  # for arms that run other seeds than `seeds`
    # Axes that are crossed with the arms: a dotted key and its values, or a name and for each value what it changes.
    # There `base` replaces the recipe's, and `arms` holds what single arms change at that value.
    grid: dict[str, list[Scalar] | dict[str, Overrides]] = Field(default_factory=dict)
    compute_gain: bool = False  # whether the grid is a range of scales, along which gains in compute are read
    _folder: Path | None = PrivateAttr(default=None)  # bases are looked for here, then among the shipped recipes

    def seeds_of(self, arm: str) -> list[int]:
        """The seeds that an arm runs."""
        return self.arm_seeds.get(arm, self.seeds)


@dataclass(frozen=True)
class Run:
    """One training run of a study: its arm, its point in the grid (axis -> value), its seed and its whole recipe."""

    arm: str
    point: dict[str, Any]
    seed: int
    recipe: Recipe

    @property
    def label(self) -> str:
        """The arm with its point in the grid: "mhar", or "mhar,learning_rate=0.001"."""
        return label(self.arm, self.point)

    @property
    def name(self) -> str:
        """The run's folder below `runs/`: "mhar/seed-0"."""
        return f"{self.label}/seed-{self.seed}"

    @property
    def tokens(self) -> int:
        """How many tokens it trains on."""
        return self.recipe.training.steps * self.recipe.training.batch_size * self.recipe.data.sequence_length


def label(arm: str, point: Mapping[str, Any]) -> str:
    """An arm and its point in the grid as one word that a folder can be named by."""
    parts = (f"{axis.rpartition('.')[2]}={value}" for axis, value in point.items())
    return ",".join([arm, *(re.sub(r"[^\w.+=-]", "_", part) for part in parts)])


def load_study(source: str | Path | Mapping[str, Any], overrides: Iterable[str] = ()) -> Study:
    """The study in a file (a path, or the name of a shipped one) or a mapping.

    `overrides`, texts like "training.steps=100", change what all its runs share.
    Raises FileNotFoundError for a missing file, and ValueError in one line that names the key and what is wanted.
    """
    if isinstance(source, Mapping):
        values, folder = dict(source), None
    else:
        path = find_recipe(source, kind="study")
        values, folder = strict_yaml.read_mapping(path), path.resolve().parent
        if not {"arms", "recipe"} & values.keys() and values.keys() & Recipe.model_fields.keys() - {"name"}:
            raise ValueError(f"{path} is a recipe of one run, not a study of several: `depthroute train` runs it")
    try:
        study = Study.model_validate(values)
    except ValidationError as error:
        raise ValueError(_explain(error, values)) from None
    study = _with_overrides(study, overrides)
    study._folder = folder
    _check(study)
    return study


def runs(study: Study) -> list[Run]:
    """Every run of a study with its checked recipe: seed by seed, so that whole comparisons are there early.

    Raises ValueError that names the arm whose recipe is wrong, and where two arms describe the same run or two runs
    would share a folder.
    """
    found = [
        Run(arm, dict(point), seed, _recipe(study, arm, point, seed))
        for seed in sorted({seed for arm in study.arms for seed in study.seeds_of(arm)})
        for point in points(study)
        for arm in study.arms
        if seed in study.seeds_of(arm)
    ]
    _check_all_differ(found)
    return found


def same_run(recipe: Recipe) -> str:
    """A text that two recipes share if they train the same, whatever their names."""
    return recipe.model_copy(update={"name": ""}).model_dump_json()


def points(study: Study) -> list[dict[str, Any]]:
    """The points of the grid, as axis -> value; one empty point where there is no grid."""
    axes = [[(axis, value) for value in values] for axis, values in study.grid.items()]
    return [dict(point) for point in itertools.product(*axes)]


def _recipe(study: Study, arm: str, point: Mapping[str, Any], seed: int) -> Recipe:
    shared = {"base": study.recipe} if isinstance(study.recipe, str) else dict(study.recipe)
    base, of_point, of_arm = shared.pop("base", None), list[str](), _as_texts(study.arms[arm])
    for axis, value in point.items():
        values = study.grid[axis]
        change = dict(values[value]) if isinstance(values, dict) else {axis: value}
        base = change.pop("base", base)
        of_arm += _as_texts(change.pop("arms", {}).get(arm, {}))
        of_point += _as_texts(change)
    of_study = {"seed": seed, "name": f"{study.name}-{label(arm, point)}"}
    try:
        found = {"base": str(find_recipe(base, study._folder))} if isinstance(base, str) else {"base": base}
        return load_recipe(found, [*_as_texts(shared), *of_point, *of_arm, *_as_texts(of_study)])
    except ValueError as error:
        raise ValueError(f"{label(arm, point)}: {error}") from None


def _with_overrides(study: Study, overrides: Iterable[str]) -> Study:
    shared = {"base": study.recipe} if isinstance(study.recipe, str) else dict(study.recipe)
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"override {text!r} should look like section.key=value")
        if key in study.grid:
            raise ValueError(f"override {text!r}: {key} is an axis of the grid")
        shared.pop(key, None)  # so that it comes last
        shared[key] = strict_yaml.parse(value, f"override {text!r}")
    return study.model_copy(update={"recipe": shared})


def _as_texts(values: Mapping[str, Any]) -> list[str]:
    """Overrides as `depthroute train` takes them, key by key, so that what comes later wins only where it speaks."""
    return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in _leaves(values)]


def _leaves(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _explain(error: ValidationError, values: Mapping[str, Any]) -> str:
    messages = []
    for fault in error.errors():
        location = fault["loc"]
        key = ".".join(str(part) for part in location)
        if location[0] == "recipe" and len(location) > 1:
            messages.append(f"recipe is {values['recipe']!r}, wants {_WANTED_RECIPE}")
        elif location[0] == "grid" and len(location) > 2 and location[2] != "[key]":
            axis = location[1]
            messages.append(f"grid.{axis} is {values['grid'][axis]!r}, wants {_WANTED_AXIS}")
        elif fault["type"] == "extra_forbidden":
            messages.append(f"unknown key {key!r} in the study{nearest(key, Study.model_fields)}")
        elif fault["type"] == "missing":
            messages.append(f"{key} is missing in the study")
        else:
            messages.append(f"{key} is {fault['input']!r}: {fault['msg'].lower()}")
    return "; ".join(dict.fromkeys(messages))


def _check(study: Study) -> None:
    if len(study.arms) < 2:
        raise ValueError(f"arms: got {list(study.arms)}, wants at least two arms, since a study pairs their runs")
    _check_names(study)
    _check_seeds(study)
    _check_grid(study)
    _check_arms(study)
    for arm in study.arms:
        if not set(study.seeds_of(arm)) & set(study.seeds_of(study.baseline)):
            raise ValueError(
                f"arm_seeds: arm {arm!r} runs seeds {study.seeds_of(arm)} and the baseline "
                f"{study.seeds_of(study.baseline)}, so nothing is paired; they want a seed in common"
            )


def _check_names(study: Study) -> None:
    for arm in study.arms:
        if not _FOLDER_NAME.fullmatch(arm):
            raise ValueError(f"arms: {arm!r} names a folder, so it wants letters, digits and _ . + - alone")
    if study.baseline not in study.arms:
        raise ValueError(f"baseline: {study.baseline!r} is not an arm{nearest(study.baseline, study.arms)}")


def _check_seeds(study: Study) -> None:
    for arm in study.arm_seeds:
        if arm not in study.arms:
            raise ValueError(f"arm_seeds: {arm!r} is not an arm{nearest(arm, study.arms)}")
    for key, seeds in [("seeds", study.seeds), *((f"arm_seeds.{arm}", s) for arm, s in study.arm_seeds.items())]:
        if not seeds or len(set(seeds)) < len(seeds):
            raise ValueError(f"{key}: got {seeds}, wants at least one seed and each of them once")


def _check_grid(study: Study) -> None:
    for axis, values in study.grid.items():
        names = [str(value) for value in values]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"grid.{axis}: got {names}, wants at least one value and each of them once")
        if axis in _OF_THE_STUDY:
            raise ValueError(f"grid.{axis}: {axis} is no axis; seeds go into `seeds`, another base into a named value")
        for name, change in values.items() if isinstance(values, dict) else ():
            own_changes = change.get("arms", {})
            if not isinstance(own_changes, dict):
                raise ValueError(
                    f"grid.{axis}.{name}.arms is {own_changes!r}, wants arms and the keys that each changes"
                )
            for arm, own in own_changes.items():
                if arm not in study.arms:
                    raise ValueError(f"grid.{axis}.{name}.arms: {arm!r} is not an arm{nearest(arm, study.arms)}")
                if not isinstance(own, dict):
                    raise ValueError(f"grid.{axis}.{name}.arms.{arm} is {own!r}, wants keys and their values")
                _check_change(study, f"grid.{axis}.{name}.arms.{arm}", own)


def _check_arms(study: Study) -> None:
    for arm, change in study.arms.items():
        _check_change(study, f"arms.{arm}", change)


def _check_change(study: Study, where: str, change: Overrides) -> None:
    for key, _ in _leaves(change):
        if key in _OF_THE_STUDY:
            raise ValueError(f"{where}: sets {key!r}, which the study sets for every arm alike")
        if key.split(".")[0] in _SHARED_BY_ARMS:
            raise ValueError(f"{where}: sets {key!r}, but arms share their data; make it an axis of the grid")
        if key in study.grid:
            raise ValueError(f"{where}: sets {key!r}, which is an axis of the grid")


def _check_all_differ(found: list[Run]) -> None:
    seen: dict[str, Run] = {}
    names = set()
    for run in found:
        if run.name in names:
            raise ValueError(f"grid: two points have runs/{run.name} for their folder; name the values (a mapping)")
        names.add(run.name)
        key = same_run(run.recipe)
        if key in seen:
            raise ValueError(f"{seen[key].name} and {run.name} are the same run; a comparison of them says nothing")
        seen[key] = run
