import csv
import json

import pytest
import yaml

from depthroute.studies.worker import BUSY
from depthroute.training.recipe import load_recipe

from .conftest import STUDY

ALL = [f"{arm}/seed-{seed}" for seed in (0, 1) for arm in STUDY["arms"]]


def read_csv(out):
    with (out / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_all_runs_are_started_and_tabled(fake, tmp_path):
    result = fake.study(tmp_path)
    assert fake.started == ALL
    assert result.finished
    assert result.failed == []
    table = read_csv(tmp_path)
    assert [f"{row['label']}/seed-{row['seed']}" for row in table] == ALL
    assert {row["status"] for row in table} == {"finished"}
    assert float(table[0]["tail_loss"]) == 5.0
    assert json.loads((tmp_path / "results.json").read_text())["runs"] == result.runs
    assert yaml.safe_load((tmp_path / "study.yaml").read_text())["baseline"] == "additive"


def test_finished_runs_are_never_repeated(fake, tmp_path):
    fake.study(tmp_path)
    before = (tmp_path / "results.csv").read_text()
    fake.started.clear()
    fake.study(tmp_path)
    assert fake.started == []
    assert (tmp_path / "results.csv").read_text() == before


def test_a_grown_study_runs_what_is_new_alone(fake, tmp_path):
    fake.study(tmp_path)
    fake.started.clear()
    result = fake.study(tmp_path, {**STUDY, "seeds": [0, 1, 2]})
    assert fake.started == [f"{arm}/seed-2" for arm in STUDY["arms"]]
    assert len(result.runs) == 9


def test_a_failed_run_stays_visible_with_its_reason_and_is_tried_again(fake, tmp_path):
    fake.fails["mhar-h1/seed-0"] = (1, "Traceback:\n  line\ntorch.OutOfMemoryError: out of memory.\nsome last words")
    fake.fails["mhar-h2/seed-1"] = (-9, "step 3")
    result = fake.study(tmp_path)
    reasons = {f"{row['label']}/seed-{row['seed']}": row["reason"] for row in result.failed}
    assert reasons == {
        "mhar-h1/seed-0": "torch.OutOfMemoryError: out of memory.",
        "mhar-h2/seed-1": "killed by SIGKILL; last line: step 3",
    }
    assert [row["status"] for row in read_csv(tmp_path)].count("failed") == 2
    assert json.loads((tmp_path / "runs/mhar-h1/seed-0/failure.json").read_text())["log"] == "logs/mhar-h1/seed-0.log"
    assert "some last words" in (tmp_path / "logs/mhar-h1/seed-0.log").read_text()
    assert "mhar-h1/seed-0 failed: torch.OutOfMemoryError" in fake.output

    fake.fails.clear()
    fake.started.clear()
    assert fake.study(tmp_path).finished
    assert fake.started == ["mhar-h1/seed-0", "mhar-h2/seed-1"]
    assert not (tmp_path / "runs/mhar-h1/seed-0/failure.json").exists()


def test_a_run_that_ends_without_a_summary_has_failed(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(fake, "_files", lambda run: {})
    assert {row["reason"] for row in fake.study(tmp_path).failed} == {"ended without a summary; last line: some output"}


def test_a_run_that_another_process_holds_is_no_failure(fake, tmp_path):
    fake.fails["mhar-h1/seed-0"] = (BUSY, "held")
    result = fake.study(tmp_path)
    assert result.failed == []
    assert not result.finished
    assert "mhar-h1/seed-0 running elsewhere" in fake.output


def test_single_arms_can_be_run_and_a_misspelt_one_is_named(fake, tmp_path):
    result = fake.study(tmp_path, only=["additive"])
    assert fake.started == ["additive/seed-0", "additive/seed-1"]
    assert [row["status"] for row in result.runs].count("not started") == 4
    with pytest.raises(ValueError, match="only: 'mhar-h3' is not an arm of the study; did you mean 'mhar-h"):
        fake.study(tmp_path, only=["mhar-h3"])


def test_a_run_of_another_recipe_in_the_same_place_is_an_error(fake, tmp_path):
    fake.study(tmp_path)
    fake.started.clear()
    with pytest.raises(
        ValueError, match=r"runs/additive/seed-0 holds a run of another recipe \(training.steps differ\)"
    ):
        fake.study(tmp_path, overrides=["training.steps=20"])
    assert fake.started == []


def test_an_unfinished_run_under_another_name_is_an_error_and_a_finished_one_is_not(fake, tmp_path):
    fake.study(tmp_path, only=["additive"])
    fake.study(tmp_path, {**STUDY, "name": "renamed"}, only=["additive"])
    (tmp_path / "runs/additive/seed-1/summary.json").unlink()
    with pytest.raises(ValueError, match=r"seed-1 holds a run of another recipe \(name differ\)"):
        fake.study(tmp_path, {**STUDY, "name": "renamed"})


def test_finished_runs_of_another_study_are_reused(fake, tmp_path):
    fake.study(tmp_path / "a")
    (tmp_path / "a/runs/additive/seed-0/checkpoint-5").mkdir()
    fake.started.clear()
    width = {**STUDY, "name": "width", "grid": {"width": {"d64": {"model.decoder.hidden_size": 64}, "d128": {}}}}
    result = fake.study(tmp_path / "b", width, reuse=[tmp_path / "a"])
    assert result.finished
    assert len(fake.started) == 6
    assert all("width=d64" in name for name in fake.started)
    copied = tmp_path / "b/runs/additive,width=d128/seed-0"
    assert load_recipe(copied / "recipe.yaml").name == "example-additive"
    assert not (copied / "checkpoint-5").exists()
    with pytest.raises(FileNotFoundError, match="is not a study folder"):
        fake.study(tmp_path / "b", width, reuse=[tmp_path / "a/runs"])
    with pytest.raises(FileNotFoundError, match="is not a study folder"):
        fake.study(tmp_path / "c", width, reuse=[tmp_path / "nothing"])
    assert not (tmp_path / "c").exists()


def test_names_of_arms_stand_whole_away_from_a_terminal(fake, tmp_path):
    fake.console.width = 80
    study = {**STUDY, "grid": {"length": {"a-good-deal-longer" * 5: {}}}}
    fake.study(tmp_path, study)
    table = fake.output.partition("held-out loss  ")[2]
    assert "mhar-h2,length=" + "a-good-deal-longer" * 5 in table
    assert "…" not in table
    assert fake.console.width == 80


def test_a_grid_has_a_column_for_each_axis(fake, tmp_path):
    grid = {"optimizer.beta1": [0.8, 0.9], "length": {"short": {}, "long": {"training.steps": 20}}}
    fake.study(tmp_path, {**STUDY, "grid": grid, "seeds": [0]})
    table = read_csv(tmp_path)
    assert len(table) == 12
    assert [(row["optimizer.beta1"], row["length"], row["steps"]) for row in table[::3]] == [
        ("0.8", "short", "10"),
        ("0.8", "long", "20"),
        ("0.9", "short", "10"),
        ("0.9", "long", "20"),
    ]


def test_nothing_starts_for_a_wrong_study(fake, tmp_path):
    with pytest.raises(ValueError, match="is not an arm"):
        fake.study(tmp_path / "out", {**STUDY, "baseline": "aditive"})
    assert not (tmp_path / "out").exists()
