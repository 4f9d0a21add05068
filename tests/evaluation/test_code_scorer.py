"""The scorer of generated code: right and wrong programs, pass@k, and no other scorer."""

from __future__ import annotations

from types import SimpleNamespace

import evaluate
import pytest

from depthroute.evaluation.code_scorer import SandboxedCodeEval, refuse_other_scorers, sandboxed_scoring

TESTS = "assert add(2, 3) == 5"
RIGHT, WRONG = "def add(a, b): return a + b", "def add(a, b): return a * b"


def test_right_and_wrong(sandbox):
    scores, reasons = SandboxedCodeEval().compute(references=[TESTS, TESTS], predictions=[[RIGHT], [WRONG]], k=[1])
    assert scores == {"pass@1": 0.5}
    assert reasons == {0: ["passed"], 1: ["failed AssertionError"]}


def test_pass_at_k_is_unbiased(sandbox):
    predictions = [[RIGHT, WRONG, WRONG, WRONG]]
    scores, _ = SandboxedCodeEval().compute(references=[TESTS], predictions=predictions, k=[1, 2, 4, 5])
    assert scores == {"pass@1": 0.25, "pass@2": 0.5, "pass@4": 1.0}


def test_tasks_get_the_sandboxed_scorer_while_they_load(monkeypatch):
    monkeypatch.setattr(evaluate, "load", lambda path, *args, **kwargs: f"the hub's {path}")
    with sandboxed_scoring():
        assert isinstance(evaluate.load("code_eval"), SandboxedCodeEval)
        assert evaluate.load("bleu") == "the hub's bleu"
    assert evaluate.load("code_eval") == "the hub's code_eval"


def test_a_task_with_another_scorer_is_refused():
    task = SimpleNamespace(
        UNSAFE_CODE=True, config=SimpleNamespace(task="other"), _metric_fn_list={"m": pytest.approx.__call__}
    )
    with pytest.raises(ValueError, match="'other' runs generated code outside of the sandbox"):
        refuse_other_scorers([task])
