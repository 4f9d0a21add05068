"""`bench train` at a tiny size on the CPU: what it measures is whole, and its arms are comparable."""

from __future__ import annotations

import pytest
import torch

from depthroute.bench import train

OVERRIDES = {"vocab_size": 64, "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8,
             "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


@pytest.mark.parametrize("precision", train.PRECISIONS)
def test_every_scheme_gets_a_row_beside_the_first(precision):
    schemes = ["additive", "mhar", "mhar:num_heads=1"]
    sizes = {"batch": 1, "length": 8, "microbatches": 2, "rounds": 2, "steps": 1}
    rows = train.measure("tiny", schemes, precision, **sizes, compiled=False, overrides=OVERRIDES, device="cpu")
    assert [row["scheme"] for row in rows] == schemes
    assert rows[0]["of_first"] == 1.0
    assert all(row["tokens_per_second"]["least"] > 0 for row in rows)
    # One seed gives every arm the same other weights, and zero queries nearly the same function.
    assert rows[1]["first_loss"] == pytest.approx(rows[0]["first_loss"], rel=2e-2)
    assert all(row["step_ms"] > 0 and row["busy_ms"] is None for row in rows)  # busy is of a GPU
    assert "mhar" in train.table(rows)


@pytest.mark.slow
def test_steps_under_graphs_start_with_the_same_loss():
    sizes = {"batch": 1, "length": 8, "microbatches": 2, "rounds": 1, "steps": 1}
    common = {**sizes, "overrides": {**OVERRIDES, "num_hidden_layers": 1}, "device": "cpu"}
    graphs, eager = (
        train.measure("tiny", ["additive"], "autocast", **common, compiled=each, graphs=each) for each in (True, False)
    )
    assert [(row["compiled"], row["graphs"]) for row in (*graphs, *eager)] == [(True, True), (False, False)]
    assert graphs[0]["first_loss"] == pytest.approx(eager[0]["first_loss"], rel=1e-2)


def test_the_gradients_of_a_step_are_those_of_its_microbatches(monkeypatch):
    from depthroute.models import presets
    from depthroute.training import cuda_graphs

    own_gradients, copied = cuda_graphs.own_gradients, []
    monkeypatch.setattr(cuda_graphs, "own_gradients", lambda model: (copied.append(model), own_gradients(model)))
    weights = []
    for graphs in (True, False):
        arm = train.Arm(
            "mhar", presets.decoder_config("tiny", **OVERRIDES), "autocast", compiled=False, graphs=graphs, device="cpu"
        )
        arm.step([torch.arange(8).view(1, 8) + start for start in (0, 9, 17)])
        weights.append([parameter.detach() for parameter in arm.model.parameters()])
    assert len(copied) == 1
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_schemes_are_parsed_with_their_options():
    assert train.parse_scheme("mhar") == {"scheme": "mhar"}
    assert train.parse_scheme("mhar:num_heads=1,backend=reference") == {
        "scheme": "mhar", "num_heads": 1, "backend": "reference",
    }  # fmt: skip
