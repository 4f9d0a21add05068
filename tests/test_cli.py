"""The command line: every mistake is one clear line and a non-zero exit, and `--help` names every command."""

from __future__ import annotations

import json
import lzma
import subprocess
import sys

import pytest

from depthroute import cli


def depthroute(capsys, monkeypatch, *arguments):
    """Run the command line in this process: exit code, standard output, standard error."""
    monkeypatch.setattr(sys, "argv", ["depthroute", *map(str, arguments)])
    monkeypatch.delenv("DEPTHROUTE_DEBUG", raising=False)
    try:
        cli.main()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DEPTHROUTE_CACHE", str(tmp_path / "cache"))
    return lambda *arguments: depthroute(capsys, monkeypatch, *arguments)


@pytest.fixture
def recipe(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "name: small\nmodel: {preset: tiny}\n"
        "data: {train: embedded, tokenizer: embedded, sequence_length: 64}\n"
        "optimizer: {warmup_steps: 1}\ntraining: {steps: 2, batch_size: 2, evaluate_every: 2}\n"
    )
    return file


MISTAKES = {
    "a misspelt key": (["training.step=3"], "did you mean 'steps'|training.steps"),
    "a misspelt section": (["trainign.steps=3"], "training"),
    "a value of the wrong type": (["training.steps=many"], "training.steps"),
    "an override without a value": (["training.steps"], "training.steps"),
    "an unknown scheme": (["residual.scheme=mhra"], "unknown scheme 'mhra'; did you mean 'mhar'"),
    "heads that do not divide the width": (["residual={scheme: mhar, num_heads: 3}"], "must divide hidden_size 128"),
    "an unknown preset": (["model.preset=tinny"], "unknown preset 'tinny'; did you mean 'tiny'"),
    "a decoder that is not pre-norm": (["model.decoder.model_type=gemma2"], "model_type is 'gemma2'"),
    "a missing data file": (["data.train=missing.jsonl"], "missing.jsonl"),
    "a damaged data file": (["data.train=damaged.jsonl.xz"], "damaged.jsonl.xz"),
    "an empty corpus": (["data.train=empty.jsonl"], "empty.jsonl"),
    "a file of an unknown kind": (["data.train=text.docx"], "docx"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_a_non_zero_exit(mistake, run, recipe, tmp_path):
    whole = lzma.compress(json.dumps({"text": "Once upon a time. " * 200}).encode())
    (tmp_path / "damaged.jsonl.xz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "text.docx").write_text("text")
    overrides, wanted = MISTAKES[mistake]
    code, _, err = run("train", recipe, *overrides, "--out", tmp_path / "out")
    lines = [line for line in err.splitlines() if line.startswith("depthroute: error: ")]
    assert code != 0
    assert len(lines) == 1, err
    assert "Traceback" not in err
    assert any(part in lines[0] for part in wanted.split("|")), lines[0]
    assert not (tmp_path / "out" / "summary.json").exists()


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["train", "no-such-recipe"], "no-such-recipe"),
        (["train", "main"], "did you mean the study 'studies/main', which is for `depthroute study`?"),
        (["study", "no-such-study.yaml"], "no-such-study.yaml"),
        (["report", "no-such-folder"], "no-such-folder"),
        (["generate", "./no-such-folder", "--prompt", "x"], "no model in ./no-such-folder"),
        (["convert", "./no-such-folder", "out"], "no-such-folder"),
        (["bench", "rout", "--out", "x"], "unknown benchmark 'rout'; did you mean 'route'"),
        (["probe", "./no-such-folder"], "no-such-folder"),
        (["bench", "train", "--out", "recipe.yaml"], "--out is recipe.yaml, but recipe.yaml is a file"),
        (["bench", "scale", "--out", "."], "--out is ., which is a folder; wanted a file"),
        (["quickstart", "--out", "recipe.yaml"], "--out is recipe.yaml, but recipe.yaml is a file"),
        (["study", "quickstart", "--out", "recipe.yaml/a"], "--out is recipe.yaml/a, but recipe.yaml is a file"),
        (["train", "recipe.yaml", "--out", "recipe.yaml"], "--out is recipe.yaml, but recipe.yaml is a file"),
    ],
)
def test_what_is_not_there_or_in_the_way_is_named(arguments, wanted, run, recipe):
    code, _, err = run(*arguments)
    assert code != 0
    assert err.strip().splitlines()[-1].startswith("depthroute: error: ")
    assert wanted in err


def test_a_misspelt_folder_names_the_nearest_one(run, tmp_path):
    (tmp_path / "model").mkdir()
    for command in (["probe"], ["report"], ["generate", "--prompt", "x"], ["evaluate", "--tasks", "x"]):
        code, _, err = run(command[0], "./modle", *command[1:])
        assert code == 1
        assert "did you mean 'model'?" in err
    code, _, err = run("convert", "./modle", "out")
    assert (code, "./modle: no such folder or file; did you mean 'model'?" in err) == (1, True)
    code, _, err = run("study", "quickstart", "--dry-run", "--reuse", "modle")
    assert (code, "it has no runs/); did you mean 'model'?" in err) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["main", "--dry-run"], "no study 'main'; did you mean 'studies/main'?"),
        (["quickstart", "--dry-run", "--only", "mhar-h9"], "only: 'mhar-h9' is not an arm of the study"),
        (["quickstart", "--dry-run", "--workers", 0], "workers: got 0, wants at least 1"),
        (["quickstart", "--dry-run", "--reuse", "nothing"], "reuse: nothing is not a study folder"),
        (["quickstart", "--dry-run", "--rate", 0], "rate: got 0, wants a positive number of tokens a second"),
        (["quickstart", "--dry-run", "--rate", "nan"], "rate: got nan, wants a positive number of tokens a second"),
        (["quickstart", "--rate", 1000], "rate: got 1000, but only a dry run takes a speed"),
    ],
)
def test_what_a_study_refuses_a_dry_run_refuses_too(arguments, wanted, run, tmp_path):
    code, out, err = run("study", *arguments)
    assert (code, out) == (1, "")
    assert f"depthroute: error: {wanted}" in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["probe", ".", "--tokens", 1], "--tokens"),
        (["generate", ".", "--prompt", "x", "--seed", -1], "--seed"),
        (["generate", ".", "--prompt", "x", "--seed", 2**32], "--seed"),
        (["generate", ".", "--prompt", "x", "--temperature", "nan"], "--temperature"),
        (["generate", ".", "--prompt", "x", "--max-new-tokens", 0], "--max-new-tokens"),
        (["evaluate", ".", "--tasks", "x", "--limit", 0], "--limit"),
    ],
)
def test_a_senseless_number_names_its_option(arguments, option, run):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert f"Invalid value for '{option}'" in err


def test_a_dry_run_shows_the_chosen_arms(run):
    code, out, err = run("study", "quickstart", "--dry-run", "--only", "hyper_connections-static")
    assert code == 0, err
    assert "quickstart: 2 runs" in out
    assert "│ hyper_connections-static │" in out
    assert "additive " not in out.partition("In all")[0]


def test_help_names_every_command(run):
    code, out, _ = run("--help")
    assert code == 0
    assert all(name in out for name in ("quickstart", "train", "study", "convert", "probe", "report", "generate"))


@pytest.mark.parametrize("arguments", [["bench"], ["bench", "--help"], ["bench", "-h"]])
def test_bench_alone_says_what_it_measures(arguments, run):
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    assert all(f"\n  {name} " in out for name in cli.BENCHES)


@pytest.mark.parametrize("name", cli.BENCHES)
def test_every_benchmark_has_a_help_of_its_own(name, run):
    code, out, _ = run("bench", name, "--help")
    assert code == 0
    assert f"depthroute bench {name}" in out


def test_generate_prints_the_prompt_and_how_it_goes_on(run, monkeypatch):
    monkeypatch.setattr("depthroute.models.text.generate_text", lambda folder, prompt, **_: " was calm.")
    assert run("generate", ".", "--prompt", "The sea") == (0, "The sea was calm.\n", "")
    assert "prints the prompt and how it goes on" in run("generate", "--help")[1]


def test_train_generate_and_report_work_together(run, recipe, tmp_path):
    code, out, err = run("train", recipe, "residual.scheme=mhar", "--out", tmp_path / "out")
    assert code == 0, err
    assert "held-out loss" in out
    code, out, err = run("generate", tmp_path / "out", "--prompt", "The sea", "--max-new-tokens", 5)
    assert code == 0, err
    assert out.startswith("The sea")
    assert len(out.strip()) > len("The sea")
    code, out, err = run("probe", tmp_path / "out", "--tokens", 256)
    assert code == 0, err
    assert "Loading weights" not in err  # no bars away from a terminal
    code, out, err = run("report", tmp_path / "out")
    assert code == 0, err
    assert (tmp_path / "out" / "report" / "index.html").is_file()


def test_a_missing_extra_is_named(monkeypatch, run):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in [name for name in sys.modules if name.startswith("depthroute.report")]:
        monkeypatch.delitem(sys.modules, name)
    code, _, err = run("report", ".")
    assert code != 0
    assert "pip install 'depthroute[report]'" in err


def test_importing_depthroute_needs_no_extra():
    code = (
        "import sys\n"
        "for name in ('pydantic', 'datasets', 'matplotlib', 'jinja2', 'triton'):\n"
        "    sys.modules[name] = None\n"
        "import depthroute\n"
        "print(depthroute.residual.available())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "mhar" in done.stdout
