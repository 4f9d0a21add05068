"""Back to a stock model where that is exact, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from depthroute.convert import convert_checkpoint, to_stock
from support.models import move_off_init, routed, tokens

pytestmark = pytest.mark.compat


@pytest.mark.parametrize("residual", [{"scheme": "additive"}, {"scheme": "delta_mhar", "block_layers": 1}], ids=str)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_stock_model_computes_the_same_and_shares_nothing(residual, tied, original):
    source = original(tie_word_embeddings=tied)
    converted = convert_checkpoint(source, residual=residual)
    stock = to_stock(converted)
    assert type(stock) is LlamaForCausalLM
    wanted = converted(tokens()).logits
    assert torch.equal(stock(tokens()).logits, wanted)
    assert stock.config.to_dict() == source.config.to_dict() | {"dtype": "float32"}
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.zero_()
    assert torch.equal(converted(tokens()).logits, wanted)


def test_trained_queries_behind_closed_gates_change_nothing():
    model = move_off_init(routed({"scheme": "delta_mhar"}, "llama"))
    with torch.no_grad():
        for read in model.model.residual.reads:
            read.gate.zero_()
    assert torch.equal(to_stock(model)(tokens()).logits, model(tokens()).logits)


def test_one_open_gate_is_refused_and_named():
    model = routed({"scheme": "delta_mhar"}, "llama")
    with torch.no_grad():
        model.model.residual.reads[3].gate.fill_(1e-8)
    with pytest.raises(
        ValueError, match=r"1 of 6 gates are not zero, for example model\.residual\.reads\.3\.gate = 1e-08"
    ):
        to_stock(model)


@pytest.mark.parametrize("scheme", ["mhar", "block_mhar", "hyper_connections"])
def test_schemes_that_replace_the_stream_are_refused(scheme):
    with pytest.raises(ValueError, match=f"no stock model computes the same: {scheme} has no residual stream"):
        to_stock(routed({"scheme": scheme}, "llama"))


def test_other_models_are_refused(original):
    with pytest.raises(TypeError, match="model is LlamaForCausalLM"):
        to_stock(original())
