"""`bench train` at a tiny size on the CPU: what it measures is whole, and its arms are comparable."""

from __future__ import annotations

import pytest

from bench.jobs import OVERRIDES, jobs
from depthroute.bench import train


@pytest.mark.parametrize("precision", train.PRECISIONS)
def test_every_scheme_gets_a_row_beside_the_first(precision):
    schemes = ["additive", "mhar", "mhar:num_heads=1"]
    rows = train.measure(jobs(*schemes, precision=precision), rounds=2, steps=1)
    assert [row["scheme"] for row in rows] == schemes
    assert rows[0]["of_first"] == 1.0
    assert all(row["tokens_per_second"]["least"] > 0 for row in rows)
    # One seed gives every arm the same other weights, and zero queries nearly the same function.
    assert rows[1]["first_loss"] == pytest.approx(rows[0]["first_loss"], rel=2e-2)
    assert all(row["step_ms"] > 0 and row["busy_ms"] is None for row in rows)  # busy is of a GPU
    assert "mhar" in train.table(rows)


@pytest.mark.parametrize("processes", [False, True])
def test_every_round_is_told_when_it_has_ended(processes):
    told = []
    rows = train.measure(
        jobs("additive"),
        rounds=2,
        steps=1,
        processes=processes,
        save=lambda rows: told.append((rows[0]["rounds"], "busy_ms" in rows[0], train.table(rows))),
    )
    assert [each[:2] for each in told] == [(1, False), (2, False)]
    assert rows[0]["rounds"] == 2


def test_shapes_are_held_beside_their_own_first():
    both = [*jobs("additive", "mhar"), *jobs("additive", "mhar", length=16)]
    assert train._firsts(both) == [0, 0, 2, 2]


@pytest.mark.slow
def test_steps_under_graphs_start_with_the_same_loss():
    changes = {"overrides": {**OVERRIDES, "num_hidden_layers": 1}}
    graphs, eager = (
        train.measure(jobs("additive", compiled=each, graphs=each, **changes), rounds=1, steps=1)
        for each in (True, False)
    )
    assert [(row["compiled"], row["graphs"]) for row in (*graphs, *eager)] == [(True, True), (False, False)]
    assert graphs[0]["first_loss"] == pytest.approx(eager[0]["first_loss"], rel=1e-2)
