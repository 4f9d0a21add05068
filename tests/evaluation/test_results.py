"""Results that were saved come back, and a damaged file is named."""

from __future__ import annotations

import json

import pytest

from depthroute.evaluation.results import ModelResults, as_number


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


def test_numbers_that_are_not_finite_are_valid_json_and_come_back(folder):
    values = [0.5, 2, float("nan"), float("inf"), -float("inf")]
    ModelResults(folder, {"limit": 2}).save("wikitext", {"values": values}, [{"values": values}])

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    for file in (folder / "wikitext.json", folder / "wikitext.items.jsonl"):
        saved = json.loads(file.read_text(), parse_constant=refuse)["values"]
        assert [as_number(value) for value in saved] == pytest.approx(values, nan_ok=True)


@pytest.mark.parametrize("value", ["N/A", "wikitext", "infinity", True, None, [0.5]])
def test_what_is_no_number_is_none(value):
    assert as_number(value) is None


def test_results_that_do_not_say_what_they_hold_for_are_not_taken_up(folder):
    with pytest.raises(ValueError, match="of an earlier version, without config, this is 'abc'; give another folder"):
        ModelResults(folder, {"limit": 2, "config": "abc"})
    ModelResults(folder, {"limit": 2, "generation_config": None})
