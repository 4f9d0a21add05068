"""A converted model computes what the original did, and trains at once."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from depthroute.convert import convert_checkpoint
from support.models import FAMILIES, gradients, in_fp64, tokens

pytestmark = pytest.mark.compat

DELTA = {"scheme": "delta_mhar", "block_layers": 1}
SUMS = [{"scheme": "mhar", "read_scale": "sum"}, {"scheme": "block_mhar", "read_scale": "sum", "block_layers": 2}]
EVERY_CHECKPOINT = [
    pytest.param(family, tied, id=f"{family}-{'tied' if tied else 'untied'}")
    for family in FAMILIES
    for tied in (True, False)
]
SCHEMES = [pytest.param(residual, id=residual["scheme"]) for residual in (DELTA, *SUMS)]


def relative(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


def greedy(model):
    return model.generate(tokens(length=5), max_new_tokens=12, do_sample=False, eos_token_id=None)


@pytest.mark.parametrize(("family", "tied"), EVERY_CHECKPOINT)
def test_delta_mhar_deviates_by_exactly_zero_in_fp32_and_under_bf16_autocast(family, tied, checkpoint):
    folder = checkpoint(family, tie_word_embeddings=tied)
    original = AutoModelForCausalLM.from_pretrained(folder)
    converted = convert_checkpoint(folder, residual=DELTA)
    assert torch.equal(converted(tokens()).logits, original(tokens()).logits)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(converted(tokens()).logits, original(tokens()).logits)
    assert torch.equal(greedy(converted), greedy(original))


@pytest.mark.parametrize("residual", [pytest.param(residual, id=residual["scheme"]) for residual in SUMS])
@pytest.mark.parametrize(("family", "tied"), EVERY_CHECKPOINT)
def test_sum_scaled_reads_deviate_by_rounding_alone(family, tied, residual, checkpoint):
    folder = checkpoint(family, tie_word_embeddings=tied)
    original = AutoModelForCausalLM.from_pretrained(folder)
    converted = convert_checkpoint(folder, residual=residual)
    assert relative(converted(tokens()).logits, original(tokens()).logits) < 1e-5
    assert torch.equal(greedy(converted), greedy(original))
    original, converted = in_fp64(original), in_fp64(converted)
    assert relative(converted(tokens()).logits, original(tokens()).logits) < 1e-12


@pytest.mark.parametrize("residual", SCHEMES)
def test_bf16_weights_stay_bf16(residual, checkpoint):
    folder = checkpoint(dtype=torch.bfloat16)
    original = AutoModelForCausalLM.from_pretrained(folder)
    converted = convert_checkpoint(folder, residual=residual)
    assert {parameter.dtype for parameter in converted.parameters()} == {torch.bfloat16}
    deviation = relative(converted(tokens()).logits, original(tokens()).logits)
    assert deviation == 0 if residual is DELTA else deviation < 0.03


@pytest.mark.parametrize("residual", [pytest.param(residual, id=residual["scheme"]) for residual in SUMS])
def test_every_query_of_the_sum_scaled_form_has_a_gradient_at_step_0(residual, checkpoint):
    model = convert_checkpoint(checkpoint(), residual=residual)
    _, grads = gradients(model, input_ids=tokens(), labels=tokens())
    queries = {name: grad for name, grad in grads.items() if name.endswith(".query")}
    assert len(queries) == 2 * 3  # 2L + 1 sites, the first of which has one source
    assert all(grad.norm() > 0 for grad in queries.values())
    # The weight of a key norm acts through the query: its gradient is zero until the query has moved.
    weights = [name for name in grads if name.endswith(".norm_weight")]
    assert all(grads[name].norm() == 0 for name in weights)
    one_step(model)
    _, grads = gradients(model, input_ids=tokens(), labels=tokens())
    assert all(grads[name].norm() > 0 for name in weights)


def test_every_gate_has_a_gradient_at_step_0_and_every_query_after_one_step(checkpoint):
    model = convert_checkpoint(checkpoint(), residual=DELTA)
    _, grads = gradients(model, input_ids=tokens(), labels=tokens())
    behind = ("query", "null_source")
    assert all(grads[f"model.residual.reads.{site}.gate"].norm() > 0 for site in range(6))
    assert all(grads[f"model.residual.reads.{site}.{name}"].norm() == 0 for site in range(6) for name in behind)
    one_step(model)
    _, grads = gradients(model, input_ids=tokens(), labels=tokens())
    assert all(grads[f"model.residual.reads.{site}.{name}"].norm() > 0 for site in range(6) for name in behind)


def test_the_gate_of_the_first_site_of_a_block_moves_by_eps_and_rounding_alone(checkpoint):
    # There the sources sum to the stream, so a uniform read is a multiple of it, and the norm behind undoes that.
    residual = {"scheme": "delta_mhar", "block_layers": 2}
    model = in_fp64(convert_checkpoint(checkpoint(num_hidden_layers=4), residual=residual), norm_eps=0.0)
    _, grads = gradients(model, input_ids=tokens(), labels=tokens())
    gates = [grads[f"model.residual.reads.{site}.gate"].norm() for site in range(8)]
    assert all((gate < 1e-12) == (site in (0, 4)) for site, gate in enumerate(gates))


def one_step(model):
    torch.optim.AdamW(model.parameters(), lr=1e-3).step()
