"""What was run: the recipes and environments of the runs, as tables of dotted keys."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from depthroute.report.evaluations import Evaluation
from depthroute.report.folders import Folder
from depthroute.report.probes import Probe
from depthroute.report.runs import parse_yaml

_PER_RUN = ("name", "seed")
_SHOWN_VALUES = 3


@dataclass(frozen=True)
class Recipe:
    """The recipe of one arm at one point of the grid: its text, and its settings as dotted keys."""

    arm: str
    point: str
    text: str
    values: Mapping[str, str]


@dataclass(frozen=True)
class Settings:
    """`recipes`: one for each arm and point. `differing`: the keys in which they differ.

    `groups`: heading -> key -> value: what all share, by the section of the recipe, and the environment.
    """

    recipes: tuple[Recipe, ...]
    differing: tuple[str, ...]
    groups: dict[str, dict[str, str]]


def settings(folder: Folder) -> Settings:
    recipes = []
    for group in folder.groups:
        for arm in group.arms:
            if text := next((run.recipe for run in group.of(arm) if run.recipe), ""):
                recipes.append(Recipe(arm, group.point, text, flatten(parse_yaml(text))))
    keys = [key for key in dict.fromkeys(key for recipe in recipes for key in recipe.values) if key not in _PER_RUN]
    differing = tuple(key for key in keys if len({recipe.values.get(key) for recipe in recipes}) > 1)
    groups: dict[str, dict[str, str]] = {}
    for key in keys:
        if key not in differing:
            section, _, rest = key.partition(".")
            groups.setdefault(section if rest else "general", {})[rest or key] = recipes[0].values[key]
    if environment := _shared(run.environment for run in folder.runs):
        groups["environment"] = environment
    return Settings(tuple(recipes), differing, groups)


def probe_settings(probe: Probe) -> dict[str, dict[str, str]]:
    """Heading -> key -> value: what was probed and on what, as its file says it."""
    nested = {key: flatten(value) for key, value in probe.about.items() if isinstance(value, Mapping)}
    plain = flatten({key: value for key, value in probe.about.items() if key not in nested})
    return {"what was probed": plain, **nested}


def evaluation_settings(evaluation: Evaluation) -> dict[str, dict[str, str]]:
    """Heading -> key -> value: how each model was evaluated, and whatever else the file says beside the results."""
    results = ("models", "comparisons", "tasks")
    about = flatten({key: value for key, value in evaluation.found.items() if key not in results})
    models = {
        name: flatten({**model["settings"], "dtype": model["dtype"], "device": model["device"]})
        | _shared(task.get("environment") for task in model["tasks"].values())
        for name, model in evaluation.found["models"].items()
    }
    return models | ({"what was evaluated": about} if about else {})


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested mappings as dotted keys, every value as one line of text."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = _text(value)
    return flat


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return ", ".join(value)
    return json.dumps(value, default=str)


def _shared(environments: Iterable[Mapping[str, Any] | None]) -> dict[str, str]:
    """Every key of some environments with its value, or the different ones that there are."""
    flat = [flatten(environment) for environment in environments if environment]
    shown = {}
    for key in dict.fromkeys(key for values in flat for key in values):
        found = list(dict.fromkeys(values[key] for values in flat if key in values))
        shown[key] = "; ".join(found) if len(found) <= _SHOWN_VALUES else f"{len(found)} different values"
    return shown
