"""Two runs compared sequence by sequence: how sure their difference is, given the held-out text and these two runs."""

from __future__ import annotations

import numpy as np

from depthroute.report.curves import Band
from depthroute.report.runs import Run
from depthroute.studies.statistics import Summary, summarise

PLAIN, AVERAGED = "losses", "ema_losses"  # of the weights as they are, and of their average


def differences(run: Run, baseline: Run, key: str = PLAIN) -> dict[float, Summary]:
    """Training tokens -> the summary of run minus baseline over the held-out sequences, where both know them.

    The standard error is that of the mean over sequences. It says nothing of the spread between seeds.
    """
    found = {}
    for record in run.evaluations:
        left, right = (side.sequence_losses.get(record["step"], {}).get(key, ()) for side in (run, baseline))
        if len(left) == len(right) > 1:
            found[record["tokens"]] = summarise(a - b for a, b in zip(left, right, strict=True))
    return found


def difference_band(run: Run, baseline: Run, key: str = PLAIN) -> Band | None:
    """Those differences over training, in a band of one standard error to each side; None where there is none."""
    found = differences(run, baseline, key)
    if not found:
        return None
    mean = np.array([summary.mean for summary in found.values()])
    error = np.array([summary.standard_error for summary in found.values()])
    return Band(np.array(list(found), dtype=np.float64), mean, mean - error, mean + error)
