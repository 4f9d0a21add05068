"""What counts as a checkpoint, and what is taken for damaged."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from depthroute.training.checkpoints import (
    MANIFEST,
    checkpoints,
    fault,
    last_complete,
    rotate,
    seal,
    step_of,
)


def make(out: Path, step: int) -> Path:
    folder = out / f"checkpoint-{step}"
    (folder / "shards").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights" * 100)
    (folder / "shards" / "0.pt").write_bytes(b"moments")
    seal(folder)
    return folder


def test_the_last_complete_one_is_found_by_its_step(tmp_path):
    for step in (900, 1000, 20):
        make(tmp_path, step)
    assert last_complete(tmp_path) == tmp_path / "checkpoint-1000"


def test_none_is_found_where_none_is(tmp_path):
    (tmp_path / "checkpoint-final").mkdir()
    (tmp_path / "checkpoint-3").write_text("no folder", encoding="utf-8")
    assert last_complete(tmp_path) is None
    assert last_complete(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / MANIFEST).unlink(), "saving it was cut off"),
        (lambda folder: (folder / MANIFEST).write_text('{"files": {'), "cannot be read"),
        (lambda folder: (folder / MANIFEST).write_text("[]"), "cannot be read"),
        (lambda folder: (folder / "shards" / "0.pt").unlink(), "shards/0.pt is missing"),
        (lambda folder: (folder / "shards" / "0.pt").write_bytes(b"mom"), "shards/0.pt has 3 bytes, wanted 7"),
    ],
)
def test_an_incomplete_or_damaged_one_is_named_and_passed_over(tmp_path, caplog, damage, said):
    good, bad = make(tmp_path, 1), make(tmp_path, 2)
    damage(bad)
    with caplog.at_level(logging.WARNING):
        assert last_complete(tmp_path) == good
    assert "checkpoint-2 is not loaded" in caplog.text
    assert said in caplog.text


def test_rotation_keeps_the_last_complete_ones(tmp_path):
    for step in (1, 2, 3, 4):
        make(tmp_path, step)
    (tmp_path / "checkpoint-3" / MANIFEST).unlink()
    rotate(tmp_path, keep=2)
    assert [step_of(folder) for folder in checkpoints(tmp_path)] == [2, 4]
    rotate(tmp_path, keep=0)
    assert checkpoints(tmp_path) == []


def test_the_manifest_lists_every_file_with_its_size(tmp_path):
    sizes = json.loads((make(tmp_path, 1) / MANIFEST).read_text(encoding="utf-8"))["files"]
    assert sizes == {"model.safetensors": 700, "shards/0.pt": 7}
    assert fault(tmp_path / "checkpoint-1") is None
