"""Reading folders: what is there, what is missing, what is damaged, and what is not a folder of ours."""

from __future__ import annotations

import json

import pytest

from depthroute.report.folders import read_folder
from depthroute.studies.grid import study_text
from depthroute.studies.study import label, points
from depthroute.studies.study import load_study as load

LOSSES = {"additive": {0: 3.34, 1: 3.33}, "mhar": {0: 3.29, 1: 3.28}}


def test_a_study_gives_its_runs_by_arm_and_seed(tmp_path, make_study):
    study = read_folder(make_study(tmp_path / "study", LOSSES))
    (group,) = study.groups
    assert (study.kind, study.name, group.point) == ("study", "synthetic study", "")
    assert (group.arms, group.baseline) == (("additive", "mhar"), "additive")
    assert [(run.arm, run.seed, run.number("tail_loss")) for run in group.runs] == [
        ("additive", 0, 3.34),
        ("additive", 1, 3.33),
        ("mhar", 0, 3.29),
        ("mhar", 1, 3.28),
    ]
    assert all(run.finished and not run.remarks for run in group.runs)
    assert len(group.runs[0].evaluations) == 21
    assert len(group.runs[2].read_weights) == 8


def test_readings_and_sequence_losses_come_by_step(tmp_path, make_run):
    (run,) = read_folder(make_run(tmp_path / "run", steps=200, gates=12, sequences=5)).runs
    assert [line["step"] for line in run.readings] == [0, 100, 200]
    assert run.readings[2]["gates"]["model.residual.reads.11.gate"] == pytest.approx(0.02)
    assert set(run.sequence_losses) == {0, 100, 200}
    assert {key: len(losses) for key, losses in run.sequence_losses[200].items()} == {"losses": 5, "ema_losses": 5}
    assert not run.problems
    assert len(run.evaluations) == 3


def test_a_run_folder_gives_one_group_with_that_run(tmp_path, make_run):
    folder = read_folder(make_run(tmp_path / "run", name="my run", seed=3))
    (run,) = folder.runs
    assert (folder.kind, folder.name, run.arm, run.seed) == ("run", "my run", "my run", 3)
    assert folder.groups[0].baseline is None


def test_a_grid_gives_a_group_for_each_point(tmp_path, make_run):
    settings = {
        "name": "grid",
        "recipe": {},
        "arms": {"additive": {}, "mhar": {}},
        "baseline": "additive",
        "seeds": [0],
        "arm_seeds": {"mhar": [0, 1]},
        "grid": {"optimizer.learning_rate": [5e-4, 1e-3], "my size": {"1 b": {}}},
    }
    study = load(settings)
    (tmp_path / "study.yaml").write_text(study_text(study))
    for arm in study.arms:
        for point in points(study):
            for seed in study.seeds_of(arm):
                make_run(tmp_path / "runs" / label(arm, point) / f"seed-{seed}", seed=seed, steps=10)
    folder = read_folder(tmp_path)
    assert [group.point for group in folder.groups] == [
        "learning_rate=0.0005, my_size=1_b",
        "learning_rate=0.001, my_size=1_b",
    ]
    for group in folder.groups:
        assert [(run.arm, run.seed, run.state) for run in group.runs] == [
            ("additive", 0, "finished"),
            ("mhar", 0, "finished"),
            ("mhar", 1, "finished"),
        ]


def test_runs_without_a_study_file_are_found_and_it_is_named_as_missing(tmp_path, make_study):
    folder = make_study(tmp_path / "study", LOSSES)
    (folder / "study.yaml").unlink()
    study = read_folder(folder)
    assert study.problems == ("study.yaml: missing",)
    assert study.groups[0].arms == ("additive", "mhar")
    assert study.groups[0].baseline is None


def test_states_and_reasons_of_runs_that_are_not_finished(tmp_path, make_study, make_run):
    folder = make_study(tmp_path / "study", LOSSES, seeds=[0, 1, 2])
    begun = folder / "runs" / "mhar" / "seed-1"
    (begun / "summary.json").unlink()
    failed = make_run(folder / "runs" / "additive" / "seed-1", finished=False, steps=50)
    (failed / "summary.json").unlink()
    (failed / "failure.json").write_text(json.dumps({"error": "RuntimeError: no room", "log": "logs/x"}))
    found = {(run.arm, run.seed): run for run in read_folder(folder).runs}
    assert found["mhar", 1].remarks == ("unfinished: no summary.json; the last recorded step is 2000",)
    assert found["additive", 1].remarks == ("failed: RuntimeError: no room",)
    assert found["mhar", 2].state == "not started"
    assert found["mhar", 0].finished


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("summary.json", "{", "summary.json: damaged (Expecting property name"),
        ("summary.json", "[]", "summary.json: holds a list; wanted a dict"),
        ("summary.json", '{"tail_loss": "low"}', "summary.json: tail_loss is 'low'; wanted a number"),
        ("environment.json", "no", "environment.json: damaged"),
        ("read_weights.json", "{}", "read_weights.json: holds a dict; wanted a list"),
        ("read_weights.json", '[{"site": 1, "sources": ["a", "b"], "weights": [[1]]}]', "read_weights.json: damaged"),
        ("read_weights.json", '[{"site": 1, "sources": ["a"], "weights": [[NaN]]}]', "read_weights.json: damaged"),
        ("metrics.jsonl", '{"kind": "train"}\nnothing\n{}\n', "metrics.jsonl: 3 damaged line(s), the first is line 1"),
        ("metrics.jsonl", '{"kind": "residual", "step": 1, "tokens": 2}\n\n{}\n', "metrics.jsonl: 2 damaged line(s)"),
        ("metrics.jsonl", b"\xff\xfe", "metrics.jsonl: cannot be read"),
        ("held_out.jsonl", '{"step": 1, "losses": [1, "a"]}\n\n', "held_out.jsonl: 1 damaged line(s)"),
        ("metrics.jsonl", None, "metrics.jsonl: missing"),
        ("recipe.yaml", None, "recipe.yaml: missing"),
    ],
)
def test_a_damaged_file_is_named_once_and_the_rest_is_shown(tmp_path, make_run, name, content, problem):
    folder = make_run(tmp_path / "run", steps=100)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (run,) = read_folder(folder).runs
    assert len(run.problems) == 1
    assert run.problems[0].startswith(problem)
    assert run.finished == (name != "summary.json")


def test_a_last_line_that_a_kill_cut_off_is_said_and_left_out(tmp_path, make_run):
    folder = make_run(tmp_path / "run", finished=False)
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text()[:-30])
    (run,) = read_folder(folder).runs
    assert run.problems == ("metrics.jsonl: the last line is cut off",)
    assert run.evaluations[-1]["step"] == 1900


def test_a_step_that_was_run_twice_counts_once(tmp_path, make_run):
    folder = make_run(tmp_path / "run", steps=200)
    again = {"kind": "evaluation", "step": 100, "tokens": 100 * 65536, "loss": 1.25}
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps(again) + "\n")
    (run,) = read_folder(folder).runs
    assert [record["step"] for record in run.evaluations] == [0, 100, 200]
    assert run.evaluations[1]["loss"] == 1.25


def test_samples_are_read_and_damaged_ones_are_named(tmp_path, make_run):
    folder = make_run(tmp_path / "run", steps=10)
    (folder / "samples.json").write_text(json.dumps([{"arm": "a", "prompt": "b", "text": "c"}, {"text": 3}]))
    found = read_folder(folder)
    assert found.samples == ({"arm": "a", "prompt": "b", "text": "c"},)
    assert found.problems == ("samples.json: damaged (wanted objects with `arm`, `prompt` and `text`)",)


def test_a_baseline_that_is_no_arm_is_named(tmp_path, make_study):
    study = read_folder(make_study(tmp_path / "study", LOSSES, baseline="aditive"))
    assert study.problems == ("study.yaml: the baseline 'aditive' is not one of the arms",)
    assert study.groups[0].baseline is None


def test_what_is_no_folder_of_ours_is_refused_in_one_line(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"folder: .*nowhere is not a folder"):
        read_folder(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"is neither a run folder .* nor a study folder"):
        read_folder(tmp_path)
    (tmp_path / "study.yaml").write_text("a: [")
    with pytest.raises(ValueError, match=r"names no arm and holds no run; study.yaml: damaged") as caught:
        read_folder(tmp_path)
    assert "\n" not in str(caught.value)
