"""The deviations are what they are said to be."""

from __future__ import annotations

import pytest
import torch

from depthroute.convert import compare, convert_checkpoint
from depthroute.data import load_tokenizer


@pytest.fixture
def pair(original):
    """A model, and its conversion with one weight moved."""
    source = original()
    converted = convert_checkpoint(source, residual={"scheme": "delta_mhar"})
    with torch.no_grad():
        converted.model.norm.weight[5] += 0.5
    return source, converted


def test_deviations_by_hand(pair):
    found = compare(*pair, sequences=2, length=9)
    ids = torch.randint(131, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted, got = (model(ids).logits for model in pair)
    difference = (wanted - got).abs()
    assert found["tokens"] == 18
    assert found["fp32"]["largest_absolute"] == pytest.approx(difference.max().item(), rel=1e-5)
    relative = (difference.amax(-1) / wanted.abs().amax(-1)).max().item()
    assert found["fp32"]["largest_relative"] == pytest.approx(relative, rel=1e-5)
    assert found["fp32"]["same_top_token"] == (wanted.argmax(-1) == got.argmax(-1)).sum().item() / 18
    for name, model in zip(("original", "converted"), pair, strict=True):
        assert found["fp32"][f"loss_{name}"] == pytest.approx(model(ids, labels=ids).loss.item(), rel=1e-5)


def test_rounding_is_told_apart_from_the_conversion(pair):
    source, _ = pair
    exact = convert_checkpoint(source, residual={"scheme": "delta_mhar"})
    found = compare(source, exact, sequences=2, length=9)
    for precision in ("bf16", "bf16_autocast"):
        assert found[precision]["largest_absolute"] == 0
        apart = [found[precision][f"{who}_from_fp32"]["largest_absolute"] for who in ("original", "converted")]
        assert apart[0] == apart[1] > 0


def test_both_models_are_left_as_they_were(pair):
    before = [(p.data_ptr(), p.dtype, p.clone()) for model in pair for p in model.parameters()]
    pair[1].train()
    compare(*pair, sequences=1, length=4)
    after = [(p.data_ptr(), p.dtype, p) for model in pair for p in model.parameters()]
    assert all(a[:2] == b[:2] and torch.equal(a[2], b[2]) for a, b in zip(before, after, strict=True))
    assert (pair[0].training, pair[1].training) == (False, True)


def test_a_changed_model_generates_another_text(pair):
    source, converted = pair
    with torch.no_grad():
        converted.model.norm.weight.neg_()
    greedy = compare(source, converted, sequences=2, length=20, new_tokens=8)["greedy"]
    assert greedy["equal"] == 0
    assert all(0 <= same < 8 for same in greedy["tokens_until_first_difference"])


def test_a_tokenizer_with_ids_that_the_model_does_not_have_is_not_used(pair):
    found = compare(*pair, load_tokenizer("embedded"), sequences=1, length=8)
    assert found["text"] == "random token ids (the tokenizer has ids that the model does not)"


def test_the_text_fits_the_positions_of_the_model(original):
    source = original(max_position_embeddings=32)
    assert compare(source, source, sequences=2)["tokens"] == 64
