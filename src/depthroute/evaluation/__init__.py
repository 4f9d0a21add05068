"""What two models score on the same items, and whether the difference is more than chance."""

from depthroute.evaluation.significance import (
    Comparison,
    Interval,
    TaskComparison,
    compare_tasks,
    holm,
    mcnemar,
    paired_bootstrap,
)

__all__ = ["Comparison", "Interval", "TaskComparison", "compare_tasks", "holm", "mcnemar", "paired_bootstrap"]
