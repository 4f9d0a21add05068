"""`depthroute evaluate`: the table on the screen, and every mistake in one line."""

from __future__ import annotations

import sys

import pytest

from depthroute import cli

MHAR = {"scheme": "mhar", "num_heads": 2}


@pytest.fixture
def run(data_root, tmp_path, monkeypatch, capsys):
    """run(*arguments): exit code, standard output, the last line of standard error."""

    def call(*arguments):
        given = ["depthroute", "evaluate", "--data-root", data_root, "--out", tmp_path / "out", *arguments]
        monkeypatch.setattr(sys, "argv", list(map(str, given)))
        monkeypatch.delenv("DEPTHROUTE_DEBUG", raising=False)
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err.strip().rpartition("\n")[2]

    return call


def test_one_model(run, save):
    code, out, _ = run(save("model", MHAR), "--tasks", "piqa, boolq", "--limit", 1, "--batch-size", 2)
    assert code == 0
    assert "## model" in out
    assert "| piqa | 0 | 1 | acc_norm |" in out
    assert "batch size 2, context 512 tokens" in out
    assert "only the first 1 items" in out
    assert "boolq: the passages are missing: not the standard task" in out


def test_two_models(run, save):
    code, out, _ = run(save("one", MHAR), save("two", MHAR, 1), "--tasks", "piqa,lambada_openai")
    assert code == 0
    assert out.startswith("## one")
    assert "## two against one" in out
    assert "| piqa acc_norm | 2 |" in out


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--dtype", "fp16"], "dtype: unknown 'fp16' (known: auto, bfloat16, float16, float32)"),
        (["--out", __file__], "is a file; wanted a folder"),
    ],
)
def test_a_wrong_option_is_found_before_earlier_results_are_looked_at(option, message, run, save):
    model = save("model", MHAR)
    run(model, "--tasks", "boolq", "--limit", 1)
    code, out, line = run(model, "--tasks", "boolq", "--limit", 1, *option)
    assert (code, out) == (1, "")
    assert message in line


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ("hellaswog", "tasks: 'hellaswog' has no form that is read from local files; did you mean 'hellaswag'?"),
        ("humaneval", "tasks: humaneval runs code that the model generates; --allow-code runs it in a sandbox"),
        ("mmlu", "mmlu.tar.xz: not in the form that mmlu_"),
        (",", "tasks: there are none; wanted at least one"),
    ],
)
def test_a_mistake_is_one_line(tasks, message, run, save):
    code, out, line = run(save("model", MHAR), "--tasks", tasks)
    assert (code, out) == (1, "")
    assert line.startswith("depthroute: error: ")
    assert message in line
