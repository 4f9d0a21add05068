"""`bench train` at a tiny size on the CPU: what it measures is whole, and its arms are comparable."""

from __future__ import annotations

import pytest

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
    assert "mhar" in train.table(rows)


def test_schemes_are_parsed_with_their_options():
    assert train.parse_scheme("mhar") == {"scheme": "mhar"}
    assert train.parse_scheme("mhar:num_heads=1,backend=reference") == {
        "scheme": "mhar", "num_heads": 1, "backend": "reference",
    }  # fmt: skip
