"""The READMEs of studies A and B from made-up runs: some finished, one failed, one cut off, the others missing."""

import csv
import json

import pytest

from depthroute.studies.landing_command import OVERRIDES
from depthroute.studies.results import run_folder
from depthroute.studies.study import load_study, runs
from depthroute.training.recipe import recipe_text
from support.records import record

# What an arm's loss is above that of mhar-h4, at the end and (negative: it was ahead) in the middle of the run.
_ABOVE = {
    "additive": (0.2, 0.3),
    "mhar-h1": (0.01, -0.05),
    "mhar-h4": (0.0, 0.0),
    "hyper_connections-static": (0.1, 0.1),
}
_SPEEDS = {"additive": 800_000.0, "hyper_connections-static": 200_000.0}
_STEP = 65_536


def finish(out, run, above=None):
    """The small files of a finished run."""
    end, middle = above or _ABOVE[run.arm]
    noise = 0.001 * run.seed * (run.arm == "mhar-h4")
    losses = {0: 10.8, 500: 5.0 + middle, 1000: 4.6 + middle, 2000: 4.0 + end + noise}
    folder = run_folder(out, run)
    folder.mkdir(parents=True)
    lines = [
        {"kind": "evaluation", "step": s, "tokens": s * _STEP, "loss": x, "num_tokens": 1_000_000, "seconds": 2.0}
        for s, x in losses.items()
    ]
    held_out = [{"step": step, "losses": [loss - 0.1, loss + 0.1]} for step, loss in losses.items()]
    for name, records in (("metrics.jsonl", lines), ("held_out.jsonl", held_out)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in records))
    summary = {
        "scheme": run.recipe.residual["scheme"],
        "seed": run.seed,
        "parameters": 63_500_000,
        "residual_parameters": 0 if run.arm == "additive" else 24_576,
        "steps": 2000,
        "tokens": 2000 * _STEP,
        "final_loss": losses[2000],
        "tail_loss": losses[2000] + 0.02,
        "tail_evaluations": 6,
        "unigram_entropy": 7.4,
        "tokens_per_second": _SPEEDS.get(run.arm, 640_000.0),
        "peak_memory_bytes": 21_000_000_000,
        "seconds_to_first_step": 60.0,
        "seconds": 250.0,
    }
    packages = {"torch": "2.11.0", "triton": "3.6.0", "transformers": "5.17.0"}
    environment = {"devices": ["A GPU"], "python": "3.12.3", "packages": packages, "commit": "0123abc", "dirty": None}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "environment.json").write_text(json.dumps(environment))
    (folder / "recipe.yaml").write_text(recipe_text(run.recipe))


@pytest.fixture(scope="module")
def study_a(tmp_path_factory):
    place = tmp_path_factory.mktemp("study-a")
    planned = {run.name: run for run in runs(load_study("studies/study-a", OVERRIDES))}
    for arm in ("additive", "mhar-h1", "mhar-h4"):
        for seed in (0, 1) if arm != "additive" else (0, 1, 2):
            finish(place / "results", planned[f"{arm}/seed-{seed}"])
    finish(place / "results", planned["hyper_connections-static/seed-0"])
    failed, cut = (run_folder(place / "results", planned[f"{arm}/seed-0"]) for arm in ("mhc", "denseformer"))
    for folder in (failed, cut):
        folder.mkdir(parents=True)
    (failed / "failure.json").write_text(json.dumps({"error": "OutOfMemoryError: none left", "log": "logs/mhc.log"}))
    (cut / "metrics.jsonl").write_text(json.dumps({"kind": "evaluation", "step": 0, "tokens": 0, "loss": 10.8}) + "\n")
    record("study-a").main(place)
    return place, (place / "README.md").read_text(encoding="utf-8")


def lines_with(text, *words):
    return [line for line in text.splitlines() if all(word in line for word in words)]


def test_losses_and_paired_differences_with_their_errors_and_n(study_a):
    _, text = study_a
    table = {line.split("|")[1].strip(): line for line in lines_with(text, "| ", "21.0 GB")}
    assert "4.2200 ± 0.0000" in table["`additive`"]
    assert "\N{MINUS SIGN}0.1900 ± 0.0000 (n = 2)" in table["`mhar-h1`"]
    assert "\N{MINUS SIGN}0.1995 ± 0.0005 (n = 2)" in table["`mhar-h4`"]
    assert "0.80x" in table["`mhar-h4`"]
    assert "200,000\\*" in table["`hyper_connections-static`"]
    (pair,) = lines_with(text, "`mhar-h4` minus `mhar-h1` ")
    assert "\N{MINUS SIGN}0.0095 ± 0.0005 (n = 2)" in pair


def test_it_says_what_holds_and_where_the_order_changed(study_a):
    _, text = study_a
    assert lines_with(text, "mhar-h4 has the lowest held-out loss", "lower in 2 of 2 pairs")
    assert lines_with(text, "H = 4 against H = 1, at the last step", "more than two standard errors below zero")
    assert lines_with(text, "`mhar-h4` is ahead from 131.1 M tokens on", "changes of the order: 1")


def test_at_equal_time_a_slow_arm_is_read_early(study_a):
    _, text = study_a
    (slow,) = lines_with(text.partition("## At equal steps")[2].partition("## Over")[0], "hyper_connections-static")
    step, seconds = (float(cell) for cell in slow.split("|")[2:4])
    assert step == pytest.approx(4.1)
    assert seconds == pytest.approx(5.1)


def test_failed_cut_and_missing_runs_are_named(study_a):
    _, text = study_a
    assert "8 of 20 runs are finished" in text
    assert "- `mhc`, seed 0: **failed**: OutOfMemoryError: none left" in text
    assert "- `denseformer`, seed 0: **unfinished**: no summary.json; the last recorded step is 0" in text
    assert "- `mhar-h4`, seed 2: **not started**" in text


def test_tables_and_figures_lie_beside_it(study_a):
    place, text = study_a
    with (place / "results/results.csv").open(newline="") as file:
        assert [row["status"] for row in csv.DictReader(file)].count("finished") == 8
    assert {path.name for path in (place / "figures").iterdir()} == {"loss.svg", "difference.svg"}
    assert all(f"(figures/{name}.svg)" in text for name in ("loss", "difference"))


def test_the_long_runs_are_shown_where_there_are_any(study_a, tmp_path):
    assert "6,000 steps" not in study_a[1]
    planned = {run.name: run for run in runs(load_study("studies/study-a-long", OVERRIDES))}
    finish(tmp_path / "results-long", planned["mhar-h1/seed-0"])
    finish(tmp_path / "results-long", planned["mhar-h4/seed-0"], above=(-0.1, -0.1))
    record("study-a").main(tmp_path)
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert lines_with(text.partition("## At 6,000 steps")[2], "`mhar-h4` minus `mhar-h1`", "0.1100 (n = 1)")


def test_study_b_takes_the_width_512_from_study_a(study_a, tmp_path):
    planned = {run.name: run for run in runs(load_study("studies/study-b", OVERRIDES))}
    for seed in (0, 1):
        for arm, end in (("additive", 0.5), ("mhar-h1", 0.29), ("mhar-h4", 0.3)):
            finish(tmp_path / "results", planned[f"{arm},width=d256/seed-{seed}"], above=(end, end))
    record("study-b").main(tmp_path, study_a[0])
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "12 of 24 runs are finished" in text
    assert lines_with(text, "Width 256: H = 4 minus H = 1 is +0.0105 ± 0.0005 (n = 2)", "above zero")
    assert lines_with(text, "Width 512: H = 4 minus H = 1 is \N{MINUS SIGN}0.0095 ± 0.0005 (n = 2)", "below zero")
    assert "Width 768: no pair of H = 4 and H = 1 is finished." in text
    assert "From width 256 to 512 the advantage of several heads grows at every step of width." in text
    assert (tmp_path / "figures/width.svg").is_file()


@pytest.mark.parametrize("name", ["study-a", "study-b"])
def test_there_is_a_readme_before_the_first_run(name, tmp_path):
    module = record(name)
    module.main(tmp_path, *([tmp_path / "nothing"] if name == "study-b" else []))
    assert "0 of 2" in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_every_run_of_the_issue_comes_up_in_order():
    from depthroute.studies.landing import in_order

    script = record("study-a", "run")
    names = in_order(script.STUDY, script.FIRST)
    assert names[:4] == ["additive/seed-0", "mhar-h1/seed-0", "mhar-h4/seed-0", "additive/seed-1"]
    assert len(names) == 20
