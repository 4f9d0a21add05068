"""What saved models score on lm-eval's tasks, and whether a difference on the same items is more than chance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from depthroute.evaluation.significance import (
    Comparison,
    Interval,
    TaskComparison,
    compare_tasks,
    holm,
    mcnemar,
    paired_bootstrap,
)

if TYPE_CHECKING:
    from depthroute.evaluation.harness import evaluate_folders

__all__ = [
    "Comparison",
    "Interval",
    "TaskComparison",
    "compare_tasks",
    "evaluate_folders",
    "holm",
    "mcnemar",
    "paired_bootstrap",
]


def __getattr__(name: str) -> Any:
    # Only who evaluates waits for lm-eval to be imported, or needs it.
    if name == "evaluate_folders":
        from depthroute.evaluation.harness import evaluate_folders

        return evaluate_folders
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
