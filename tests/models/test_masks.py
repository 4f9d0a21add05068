"""Sequences without padding are read by SDPA's own causal attention, under torch.compile too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from support.models import move_off_init, routed, tokens

WINDOW = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}


def masks_of(monkeypatch, call):
    """The masks that SDPA gets."""
    seen, attention = [], F.scaled_dot_product_attention

    def watched(*args, attn_mask=None, **kwargs):
        seen.append(attn_mask)
        return attention(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    call()
    return seen


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("scheme", ["additive", "mhar"])
def test_whole_sequences_have_no_mask(scheme, compiled, monkeypatch):
    torch._dynamo.reset()
    model, ids = move_off_init(routed({"scheme": scheme})), tokens(length=9)
    run = torch.compile(model, fullgraph=True, backend="eager") if compiled else model
    masks = masks_of(monkeypatch, lambda: run(input_ids=ids, use_cache=False))
    assert len(masks) == model.config.decoder.num_hidden_layers
    assert all(mask is None for mask in masks)


@pytest.mark.parametrize("arguments", ["padding", "positions", "window"])
def test_where_a_mask_is_needed_it_is_made_and_the_result_is_the_same_compiled(arguments, monkeypatch):
    torch._dynamo.reset()
    shape = WINDOW if arguments == "window" else {}
    model, ids = move_off_init(routed({"scheme": "mhar"}, num_hidden_layers=2, **shape)), tokens(length=9)
    given = {"input_ids": ids, "use_cache": False}
    if arguments == "padding":
        given["attention_mask"] = torch.ones_like(ids)
        given["attention_mask"][0, :3] = 0
    if arguments == "positions":  # two sequences in one row
        given["position_ids"] = torch.cat([torch.arange(4), torch.arange(5)]).expand_as(ids)
    with torch.no_grad():
        masks = masks_of(monkeypatch, lambda: model(**given))
        wanted = model(**given).logits
        found = torch.compile(model, fullgraph=True, backend="eager")(**given).logits
    assert any(mask is not None for mask in masks)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_without_sdpa_a_mask_is_made():
    ids = tokens(length=9)
    sdpa = move_off_init(routed({"scheme": "additive"}))
    eager = move_off_init(routed({"scheme": "additive"}))
    eager.set_attn_implementation("eager")
    torch.testing.assert_close(eager(ids).logits, sdpa(ids).logits, rtol=1e-4, atol=1e-5)
