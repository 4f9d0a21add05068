"""Runs that become archives: tiny real ones, and one that fails."""

import json
import tarfile

import pytest

from depthroute.report.folders import read_folder
from depthroute.studies import results
from depthroute.studies.landing import archive_file, in_order, land_study
from depthroute.studies.landing_command import TINY, main
from depthroute.studies.study import load_study, runs
from depthroute.training import train
from support.records import record

STUDY = {
    "name": "example",
    "recipe": {},
    "arms": {
        "additive": {"residual": {"scheme": "additive"}},
        "mhar-h1": {"residual": {"scheme": "mhar", "num_heads": 1}},
        "mhar-wide": {"residual": {"scheme": "mhar", "num_heads": 4}, "model.decoder.vocab_size": 100},  # fails
    },
    "baseline": "additive",
    "seeds": [0, 1],
}
NAMES = ["mhar-wide/seed-0", "additive/seed-0", "mhar-h1/seed-0"]


@pytest.fixture(scope="module", autouse=True)
def _places(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEPTHROUTE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.chdir(tmp_path_factory.mktemp("place"))
        yield


@pytest.fixture(scope="module")
def study():
    return {**STUDY, "recipe": load_study(STUDY, TINY).recipe}


@pytest.fixture(scope="module")
def landed(study, tmp_path_factory):
    out = tmp_path_factory.mktemp("study")
    missing = land_study(study, out, NAMES, probe=["embedded"], workers=1, ahead=2)
    return out, missing, {run.name: run for run in runs(load_study(study))}


def contents(out, run):
    with tarfile.open(archive_file(out, run)) as archive:
        return {name: archive.extractfile(name).read() for name in archive.getnames()}


@pytest.mark.slow
def test_a_run_lands_with_its_curve_its_probe_and_no_model(landed):
    out, _, by_name = landed
    found = contents(out, by_name["mhar-h1/seed-0"])
    small = {"environment.json", "held_out.jsonl", "metrics.jsonl", "probe.json", "read_weights.json", "recipe.yaml"}
    folder = "runs/mhar-h1/seed-0"
    assert found.keys() == {*(f"{folder}/{name}" for name in (*small, "summary.json")), "logs/mhar-h1/seed-0.log"}
    probe = json.loads(found[f"{folder}/probe.json"])
    assert probe["disagreement"] is not None
    assert {path.name for path in (out / folder).iterdir()} == {*small, "summary.json"}
    assert "runs/additive/seed-0/probe.json" not in contents(out, by_name["additive/seed-0"])


@pytest.mark.slow
def test_a_run_that_fails_lands_with_its_reason_and_the_others_go_on(landed):
    out, missing, by_name = landed
    assert missing == ["mhar-wide/seed-0"]
    found = contents(out, by_name["mhar-wide/seed-0"])
    reason = json.loads(found["runs/mhar-wide/seed-0/failure.json"])["error"]
    assert "model.decoder.vocab_size is 100" in reason
    assert b"vocab_size is 100" in found["logs/mhar-wide/seed-0.log"]


@pytest.mark.slow
def test_unpacked_side_by_side_the_archives_are_a_study_folder_and_make_a_readme(landed, tmp_path):
    out, _, by_name = landed
    for name in NAMES:
        with tarfile.open(archive_file(out, by_name[name])) as archive:
            archive.extractall(tmp_path / "results", filter="data")
    (tmp_path / "results/study.yaml").write_bytes((out / "study.yaml").read_bytes())
    states = {f"{run.arm}/seed-{run.seed}": run.state for run in read_folder(tmp_path / "results").runs}
    assert states == {
        "additive/seed-0": "finished",
        "mhar-h1/seed-0": "finished",
        "mhar-wide/seed-0": "failed",
        "additive/seed-1": "not started",
        "mhar-h1/seed-1": "not started",
        "mhar-wide/seed-1": "not started",
    }
    record("study-a").main(tmp_path)
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "2 of 21 runs are finished" in text  # the 20 of study A, and the arm that failed, which it does not have
    assert "- `mhar-wide`, seed 0: **failed**: ValueError: model.decoder.vocab_size is 100" in text
    assert "| `mhar-h1` | KL of 4 slices, contiguous |" in text


@pytest.mark.slow
def test_what_is_finished_is_not_run_again(landed, study):
    out = landed[0]
    summary = out / "runs/additive/seed-0/summary.json"
    before = summary.stat().st_mtime_ns
    assert land_study(study, out, ["additive/seed-0"], workers=1) == []
    assert summary.stat().st_mtime_ns == before


@pytest.mark.slow
def test_a_run_that_was_cut_while_it_was_probed_is_probed_and_lands_the_next_time(study, tmp_path):
    name = "mhar-h1/seed-1"
    (run,) = (run for run in runs(load_study(study)) if run.name == name)
    train(run.recipe, results.run_folder(tmp_path, run))
    assert land_study(study, tmp_path, [name], probe=["embedded"], workers=1) == []
    assert f"runs/{name}/probe.json" in contents(tmp_path, run)


@pytest.mark.slow
def test_a_run_whose_probe_failed_has_not_landed(study, tmp_path):
    name = "mhar-h1/seed-1"
    (run,) = (run for run in runs(load_study(study)) if run.name == name)
    assert land_study(study, tmp_path, [name], probe=["no-such-text.txt"], workers=1) == [name]
    assert f"runs/{name}/summary.json" in contents(tmp_path, run)  # what there is has come home
    assert land_study(study, tmp_path, [name], probe=["embedded"], workers=1) == []
    assert f"runs/{name}/probe.json" in contents(tmp_path, run)


def test_without_time_nothing_is_started(study, tmp_path):
    names = ["additive/seed-1", "mhar-h1/seed-1"]
    assert land_study(study, tmp_path, names, workers=1, minutes=5, least_minutes=6) == names
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [("ahead", -1), ("minutes", 0), ("minutes", float("nan")), ("least_minutes", -1), ("least_minutes", float("nan"))],
)
def test_numbers_out_of_range_are_told(study, tmp_path, name, value):
    with pytest.raises(ValueError, match=f"{name}: got {value}, wants"):
        land_study(study, tmp_path, ["additive/seed-0"], **{name: value})
    assert not (tmp_path / "study.yaml").exists()


def test_a_name_that_is_no_run_is_told(study, tmp_path):
    with pytest.raises(ValueError, match="names: 'mhar-h1/seed-2' is not a run of example"):
        land_study(study, tmp_path, ["mhar-h1/seed-2"])


def test_first_come_the_first_arms_seed_by_seed_then_the_others(tmp_path):
    arms = {**STUDY["arms"], "mhc": {"residual": {"scheme": "mhc"}}}
    study = {**STUDY, "arms": arms, "arm_seeds": {"mhc": [0]}}
    study["arms"]["mhar-wide"] = {"residual": {"scheme": "mhar", "num_heads": 4}}
    order = ["additive/seed-0", "mhar-wide/seed-0", "additive/seed-1", "mhar-wide/seed-1"]
    order += ["mhar-h1/seed-0", "mhc/seed-0", "mhar-h1/seed-1"]
    assert in_order(study, ("additive", "mhar-wide")) == order
    done = tmp_path / "runs/additive/seed-1"
    done.mkdir(parents=True)
    (done / "summary.json").write_text("{}")
    assert in_order(study, ("additive", "mhar-wide"), tmp_path) == [name for name in order if name != order[2]]


def test_the_command_lists_what_it_would_run(capsys):
    assert main("studies/study-a", ["mhar-h1/seed-0"], [], ["somewhere", "--list"]) == 0
    assert capsys.readouterr().out == "mhar-h1/seed-0\n"
    assert main("studies/study-a", ["mhar-h1/seed-0"], [], ["somewhere", "--minutes", "3", "a/seed-0", "--list"]) == 0
    assert capsys.readouterr().out == "a/seed-0\n"
