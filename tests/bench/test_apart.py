"""A call in a process of its own."""

from __future__ import annotations

import operator
import os
import time

import pytest

from depthroute.bench.apart import run_apart


def test_it_gives_what_the_call_returns():
    assert run_apart(60, operator.add, 2, 3) == 5


def test_it_raises_the_first_line_of_what_the_call_raises():
    with pytest.raises(RuntimeError, match="ValueError: invalid literal"):
        run_apart(60, int, "x")


def test_it_ends_what_takes_too_long():
    start = time.perf_counter()
    with pytest.raises(TimeoutError, match="took more than 1 s"):
        run_apart(1, time.sleep, 60)
    assert time.perf_counter() - start < 30


def test_it_sees_a_process_that_dies():
    with pytest.raises(RuntimeError, match="exit code 3"):
        run_apart(60, os._exit, 3)
