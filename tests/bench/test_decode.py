"""`bench decode` at a tiny size on the CPU: its check, its rows, and a step that goes through the cache."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._dynamo.utils import counters

from depthroute.bench import decode

OVERRIDES = {"vocab_size": 64, "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8,
             "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
SIZES = {"batches": [1, 3], "context": 16, "prefill": (2, 8), "overrides": OVERRIDES, "dtype": torch.float32}


def timed(call):
    call()
    return {"ms": float(next(timed.clock)), "eager_ms": 1.0}


@pytest.fixture(autouse=True)
def clock():
    timed.clock = itertools.count(1)


def test_every_scheme_is_checked_and_timed_beside_the_first():
    schemes = ["additive", "mhar", "block_mhar:block_layers=1", "delta_mhar:block_layers=1"]
    rows = decode.measure("tiny", schemes, **SIZES, device="cpu", times=timed)
    assert len(rows) == len(schemes) * 3
    assert all(row["green"] and row["error"] < 1e-4 for row in rows)
    assert all(row["of_first"] == 1.0 for row in rows if row["scheme"] == "additive")
    assert {(row["what"], row["batch"], row["length"]) for row in rows} == {
        ("decode", 1, 16), ("decode", 3, 16), ("prefill", 2, 8),
    }  # fmt: skip
    assert "mhar" in decode.table(rows)


def test_compiled_models_are_checked_and_timed_as_they_run():
    torch._dynamo.reset()
    counters.clear()
    rows = decode.measure("tiny", ["additive", "mhar"], **SIZES, compiled=True, device="cpu", times=timed)
    assert all(row["compiled"] and row["green"] and "ms" in row for row in rows)
    # For each scheme a step and a prompt to check, steps of two batches and a prompt to measure.
    assert counters["stats"]["unique_graphs"] == 2 * 5


def test_a_scheme_that_fails_its_check_gets_no_number(monkeypatch):
    monkeypatch.setattr(decode.Decoder, "error", lambda self: 1.0 if self.scheme == "mhar" else 0.0)
    rows = decode.measure("tiny", ["additive", "mhar"], **SIZES, device="cpu", times=timed)
    assert all(("ms" in row) == (row["scheme"] == "additive") for row in rows)
    assert "no numbers" in decode.table(rows)


def test_a_step_writes_the_next_place_of_the_cache():
    from depthroute.models import presets

    model = decode.Decoder("mhar", presets.decoder_config("tiny", **OVERRIDES), torch.float32, "cpu")
    cache = model.filled(2, 5, 16)
    model.forward(model.ids(2, 1), cache)
    assert int(cache.get_seq_length()) == 6


@pytest.mark.compat
def test_a_prompt_is_causal_without_a_mask_while_a_graph_is_captured(monkeypatch):
    from torch.nn import functional as F

    from depthroute.models import presets

    model = decode.Decoder("mhar", presets.decoder_config("tiny", **OVERRIDES), torch.float32, "cpu")
    wanted = model.forward(model.ids(2, 8))
    attend, masks = F.scaled_dot_product_attention, []

    def watched(*arguments, **options):
        masks.append((options["attn_mask"], options["is_causal"]))
        return attend(*arguments, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    monkeypatch.setattr("transformers.utils.import_utils.is_cuda_stream_capturing", lambda: True)
    assert torch.equal(model.prompt(2, 8)(), wanted)
    assert masks == [(None, True)] * 2


def test_a_context_too_short_for_its_steps_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        decode.main(["--out", str(tmp_path), "--context", "32"])
    assert "--context is 32, but should be at least 64" in capsys.readouterr().err
