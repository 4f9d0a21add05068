"""docs/recipes.md: every key with its default, and examples that load."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from depthroute.residual import _SCHEMES
from depthroute.residual.mhar import ReadOptions
from depthroute.studies.study import Study, load_study
from depthroute.training.recipe import load_recipe, make_recipe

PAGE = (Path(__file__).parents[2] / "docs/recipes.md").read_text(encoding="utf-8")
RECIPE, STUDY = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def plain(value) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def test_every_key_of_a_recipe_is_there_with_its_default():
    defaults = make_recipe({"name": "a"}).model_dump() | {"name": ""}
    del defaults["residual"]
    expected = {}
    for key, value in defaults.items():
        section = value if isinstance(value, dict) else {"": value}
        expected |= {f"{key}.{name}".strip("."): plain(default) for name, default in section.items()}
    recipes, _ = PAGE.split("## Keys of a study")
    assert dict(re.findall(r"^\| `([\w.]+)` \| (?:`(.+?)` )?\| (?!options)", recipes, re.MULTILINE)) == expected


@pytest.mark.parametrize("scheme", _SCHEMES)
def test_every_option_of_a_scheme_is_there_with_its_default(scheme):
    (row,) = re.findall(rf"^\| `{scheme}` \| (.*) \|$", PAGE, re.MULTILINE)
    options = _SCHEMES[scheme].Options
    of_mhar = [] if scheme == "mhar" else [field.name for field in dataclasses.fields(ReadOptions)] + ["read_scale"]
    own = [field for field in dataclasses.fields(options) if field.name not in of_mhar]
    assert re.findall(r"`(\w+: [^`]+)`", row) == [f"{field.name}: {plain(field.default)}" for field in own]


def test_every_key_of_a_study_is_there():
    _, studies = PAGE.split("## Keys of a study")
    assert set(Study.model_fields) <= set(re.findall(r"`(\w+)`", studies))


def test_the_examples_load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(RECIPE, encoding="utf-8")
    (tmp_path / "heads.yaml").write_text(STUDY, encoding="utf-8")
    assert load_recipe("mine.yaml").training.steps == 200
    assert list(load_study("heads.yaml").arms) == ["additive", "one-head"]
