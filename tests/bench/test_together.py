"""Arms of `bench train` in processes of their own."""

from __future__ import annotations

import pytest

from bench.jobs import jobs
from depthroute.bench import train


def test_arms_in_processes_of_their_own_give_the_rows_of_one_process():
    together = train.measure(jobs("additive", "mhar"), rounds=1, steps=1, processes=True)
    alone = train.measure(jobs("additive", "mhar"), rounds=1, steps=1)
    for row, beside in zip(together, alone, strict=True):
        assert row["first_loss"] == beside["first_loss"]
        assert row.keys() == beside.keys()
        assert row["of_first"] > 0


def test_the_error_of_a_process_is_told():
    with pytest.raises(RuntimeError, match=r"arm 1, Job\(.*no_such.*, has failed: ValueError"):
        train.measure(jobs("additive", "no_such"), rounds=1, steps=1, processes=True)
