"""Tables for the README of a record."""

from __future__ import annotations

from depthroute.report.markdown import steps_table


def test_training_steps_have_a_line_for_each_arm():
    row = {
        "preset": "100m",
        "scheme": "mhar",
        "tokens_per_second": {"median": 2000.4, "least": 1999.0, "most": 2001.0},
        "of_first": 0.9101,
        "step_ms": 43.724,
        "busy_ms": 41.789,
        "peak_memory": 3 * 2**30,
        "memory_of_first": 1.0164,
        "first_step_s": 43.9,
    }
    head, rule, line = steps_table([row]).splitlines()
    assert head.count("|") == rule.count("|") == line.count("|")
    assert line == "| 100m | `mhar` | 2,000 (1,999 to 2,001) | 0.910 | 43.72 | 41.79 | 3.00 | 1.016 | 44 |"
