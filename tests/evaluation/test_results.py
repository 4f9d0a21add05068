"""Results that were saved come back, and a damaged file is named."""

from __future__ import annotations

import pytest

from depthroute.evaluation.results import ModelResults


@pytest.fixture
def folder(tmp_path):
    results = ModelResults(tmp_path, {"limit": 2})
    results.save("piqa", {"acc": 0.5}, [{"item": 0}, {"item": 1}])
    return tmp_path


def everything(folder):
    results = ModelResults(folder, {"limit": 2})
    return results.scores("piqa"), list(results.items("piqa"))


def test_what_was_saved_comes_back(folder):
    assert ModelResults(folder, {"limit": 2}).is_finished("piqa")
    assert everything(folder) == ({"acc": 0.5}, [{"item": 0}, {"item": 1}])


@pytest.mark.parametrize(
    ("file", "where"),
    [
        ("settings.json", r"settings\.json is damaged"),
        ("piqa.json", r"piqa\.json is damaged"),
        ("piqa.items.jsonl", r"piqa\.items\.jsonl, line 2 is damaged"),
    ],
)
def test_a_damaged_file_is_named(file, where, folder):
    path = folder / file
    path.write_text(path.read_text()[:-3])
    with pytest.raises(ValueError, match=where):
        everything(folder)
