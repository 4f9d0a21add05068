"""The README keeps its word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from depthroute import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_lines_of_python_run():
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names: dict = {}
    exec(code, names)
    assert names["mix"].shape == (2, 9, 512)
    assert names["model"].model.residual.reads


def test_every_command_is_named_and_every_named_command_exists():
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"depthroute ([a-z]+)", text.split("## What you can do")[1].split("##")[0]))
    assert named == {command.name or command.callback.__name__ for command in cli.app.registered_commands}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        assert set(re.findall(r"\bmake ([a-z-]+)\b {2,}#", page.read_text())) <= targets
    assert {"quickstart", "test", "check", "bench"} <= targets
    assert "make test" in (ROOT / ".ci" / "run").read_text()
