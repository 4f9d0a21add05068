"""Generated code is scored in our sandbox, in place of lm-eval's `code_eval`, which is code fetched from the hub."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import comb
from typing import Any

import evaluate

from depthroute.evaluation.sandbox import Limits, run_program

METRIC = "code_eval"


class SandboxedCodeEval:
    """pass@k of programs that are run in a sandbox each; called as the hub's `code_eval` is."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()

    def compute(
        self, *, references: Sequence[str], predictions: Sequence[Sequence[str]], k: Sequence[int] = (1,)
    ) -> tuple[dict[str, float], dict[int, list[str]]]:
        """({"pass@k": mean over problems}, {problem: why each program passed or did not}).

        A program is a prediction with the tests of its reference below it. pass@k is the unbiased estimate of Chen et
        al. (2021), 1 - C(n - c, k) / C(n, k) for c of n right, for each k that has as many predictions.
        """
        reasons = {
            problem: [run_program(f"{candidate}\n{tests}", self.limits).reason for candidate in candidates]
            for problem, (tests, candidates) in enumerate(zip(references, predictions, strict=True))
        }
        scores = {}
        for number in k:
            if all(len(found) >= number for found in reasons.values()):
                shares = [_pass_at(number, len(found), found.count("passed")) for found in reasons.values()]
                scores[f"pass@{number}"] = sum(shares) / len(shares)
        return scores, reasons


@contextmanager
def sandboxed_scoring() -> Iterator[None]:
    """While lm-eval loads its tasks: what they get as `code_eval` is the sandboxed one."""
    load = evaluate.load

    def load_metric(path: str, *args: Any, **kwargs: Any) -> Any:
        return SandboxedCodeEval() if path == METRIC else load(path, *args, **kwargs)

    evaluate.load = load_metric
    try:
        yield
    finally:
        evaluate.load = load


def refuse_other_scorers(tasks: Iterable[Any]) -> None:
    """Raise ValueError for a task of lm-eval that runs generated code by anything but the sandbox."""
    for task in tasks:
        if getattr(task, "UNSAFE_CODE", False) and not any(map(_is_sandboxed, task._metric_fn_list.values())):
            raise ValueError(f"tasks: {task.config.task!r} runs generated code outside of the sandbox; it is not run")


def _is_sandboxed(metric: Any) -> bool:
    """Whether the module that a metric function comes from has the sandboxed scorer."""
    function = getattr(metric, "__self__", metric)  # lm-eval keeps the bound __call__
    names = getattr(function, "__globals__", {})
    return any(isinstance(value, SandboxedCodeEval) for value in names.values())


def _pass_at(k: int, programs: int, right: int) -> float:
    return 1.0 - comb(programs - right, k) / comb(programs, k)
