"""`additive` is the stock Hugging Face model, bit for bit: this notices when the library changes under us."""

from __future__ import annotations

import pytest
import torch

from support.models import FAMILIES, gradients, routed, stock, tokens

ADDITIVE = {"scheme": "additive"}
ROPE = {
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5000.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 5000.0, "factor": 2.0},
}
CONFIGURATIONS = [
    *[(family, {"tie_word_embeddings": tied}) for family in FAMILIES for tied in (True, False)],
    ("qwen3", {"attention_bias": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    *[("llama", {"rope_parameters": rope}) for rope in ROPE.values()],
    ("mistral", {"sliding_window": 4}),
    ("mistral", {"sliding_window": None}),
    *[
        (family, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1})
        for family in ("qwen2", "qwen3")
    ],
    ("qwen3", {"head_dim": 32}),
    ("llama", {"num_key_value_heads": 4}),
]


def name(value):
    return value if isinstance(value, str) else "-".join(f"{k}={v}" for k, v in value.items())[:60]


def inputs(kind):
    ids = tokens(batch=3, length=12)
    batch = {"input_ids": ids, "labels": ids}
    if kind == "left-padded":
        mask = torch.ones_like(ids)
        mask[0, :5], mask[1, :2] = 0, 0
        batch |= {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    elif kind == "positions":
        batch |= {"position_ids": torch.arange(12).expand(3, -1) + torch.tensor([[0], [3], [7]])}
    return batch


@pytest.mark.compat
@pytest.mark.parametrize("kind", ["plain", "left-padded", "positions"])
@pytest.mark.parametrize(("family", "overrides"), CONFIGURATIONS, ids=name)
def test_logits_loss_and_gradients(family, overrides, kind):
    ours, theirs = routed(ADDITIVE, family, **overrides), stock(family, **overrides)
    batch = inputs(kind)
    assert torch.equal(ours(**batch).logits, theirs(**batch).logits)
    (loss, got), (wanted_loss, wanted) = gradients(ours, **batch), gradients(theirs, **batch)
    assert torch.equal(loss, wanted_loss)
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[key], gradient) for key, gradient in wanted.items())


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_backends(attention):
    ours, theirs = routed(ADDITIVE), stock()
    for model in (ours, theirs):
        model.set_attn_implementation(attention)
    assert ours.config.decoder._attn_implementation == attention
    assert torch.equal(ours(tokens()).logits, theirs(tokens()).logits)


def test_under_bf16_autocast():
    ours, theirs = routed(ADDITIVE), stock()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(ours(tokens()).logits, theirs(tokens()).logits)


@pytest.mark.compat
def test_hidden_states():
    ours, theirs = routed(ADDITIVE), stock()
    got = ours(tokens(), output_hidden_states=True).hidden_states
    wanted = theirs(tokens(), output_hidden_states=True).hidden_states
    assert len(got) == len(wanted) == 4
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert ours(tokens()).hidden_states is None


def test_logits_to_keep_and_input_embeddings():
    ours, theirs = routed(ADDITIVE), stock()
    assert torch.equal(ours(tokens(), logits_to_keep=2).logits, theirs(tokens(), logits_to_keep=2).logits)
    embedded = ours.get_input_embeddings()(tokens())
    assert torch.equal(ours(inputs_embeds=embedded).logits, theirs(inputs_embeds=embedded).logits)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        ours(tokens(), inputs_embeds=embedded)


@pytest.mark.compat
def test_greedy_generation():
    ours, theirs = routed(ADDITIVE), stock()
    options = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(ours.generate(tokens(), **options), theirs.generate(tokens(), **options))


@pytest.mark.parametrize("by_config", [False, True])
def test_tuples_where_they_are_asked_for(by_config):
    model, other = routed({"scheme": "additive"}), stock()
    model.config.return_dict = not by_config
    asked = {} if by_config else {"return_dict": False}
    for ours, theirs in ((model, other), (model.model, other.model)):
        found = ours(input_ids=tokens(), use_cache=False, **asked)
        assert isinstance(found, tuple)
        assert len(found) == len(theirs(input_ids=tokens(), use_cache=False, return_dict=False))
