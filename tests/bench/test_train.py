"""`bench train` at a tiny size on the CPU: what it measures is whole, and its arms are comparable."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from depthroute.bench import train
from depthroute.bench.arm import Arm, Job, parse_scheme

OVERRIDES = {"vocab_size": 64, "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8,
             "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
JOB = Job("tiny", "additive", "autocast", 1, 8, 2, compiled=False, overrides=OVERRIDES, device="cpu")


def jobs(*schemes, **changes):
    return [replace(JOB, scheme=scheme, **changes) for scheme in schemes]


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


def test_arms_in_processes_of_their_own_give_the_rows_of_one_process():
    together = train.measure(jobs("additive", "mhar"), rounds=1, steps=1, processes=True)
    alone = train.measure(jobs("additive", "mhar"), rounds=1, steps=1)
    for row, beside in zip(together, alone, strict=True):
        assert row["first_loss"] == beside["first_loss"]
        assert row.keys() == beside.keys()
        assert row["of_first"] > 0


def test_the_error_of_a_process_is_told():
    with pytest.raises(RuntimeError, match=r"(?s)arm 1 has failed.*no_such"):
        train.measure(jobs("additive", "no_such"), rounds=1, steps=1, processes=True)


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


def test_the_gradients_of_a_step_are_those_of_its_microbatches(monkeypatch):
    from depthroute.training import cuda_graphs

    own_gradients, copied = cuda_graphs.own_gradients, []
    monkeypatch.setattr(cuda_graphs, "own_gradients", lambda model: (copied.append(model), own_gradients(model)))
    weights = []
    for graphs in (True, False):
        arm = Arm(replace(JOB, scheme="mhar", microbatches=3, graphs=graphs))
        arm.step()
        weights.append([parameter.detach() for parameter in arm.model.parameters()])
    assert len(copied) == 1
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_schemes_are_parsed_with_their_options():
    assert parse_scheme("mhar") == {"scheme": "mhar"}
    assert parse_scheme("mhar:num_heads=1,backend=reference") == {
        "scheme": "mhar", "num_heads": 1, "backend": "reference",
    }  # fmt: skip
