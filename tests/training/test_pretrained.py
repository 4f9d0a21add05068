"""Starting from a checkpoint: a stock one, converted on the way, and one that is depth-routed already."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from depthroute import convert_checkpoint
from depthroute.data import load_tokenizer
from depthroute.training import load_recipe
from depthroute.training.model_building import build_model
from depthroute.training.pretrained import decoder_at_hand, load_pretrained
from support.small_runs import small_recipe, write_checkpoint

RESIDUAL = {"scheme": "delta_mhar", "block_layers": 1}
IDS = torch.arange(3, 19)[None]


@pytest.fixture(scope="module")
def routed_folder(checkpoint, tmp_path_factory) -> Path:
    """A converted checkpoint whose gates have opened."""
    folder = tmp_path_factory.mktemp("routed")
    model = convert_checkpoint(checkpoint, residual=RESIDUAL)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("model.residual."):
                parameter.add_(0.1)
    model.save_pretrained(folder)
    return folder


def refusal(call, *arguments, error: type[Exception] = ValueError) -> str:
    with pytest.raises(error) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_recipe_is_taken_as_it_stands(checkpoint):
    model = load_pretrained(str(checkpoint), {"scheme": "mhar"})
    assert model.config.residual["read_scale"] == "mean"  # which `convert_checkpoint` would make "sum"


@pytest.mark.parametrize("residual", [{"scheme": "additive"}, RESIDUAL])
def test_a_stock_checkpoint_computes_what_it_did_in_fp32(checkpoint, residual, tmp_path):
    AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).save_pretrained(tmp_path)
    original = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model = load_pretrained(str(tmp_path), residual)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(model(input_ids=IDS).logits, original(input_ids=IDS).logits)


def test_a_depth_routed_checkpoint_goes_on_as_it_was(routed_folder, checkpoint):
    model = load_pretrained(str(routed_folder), RESIDUAL)
    saved = AutoModelForCausalLM.from_pretrained(routed_folder)
    assert torch.equal(model(input_ids=IDS).logits, saved(input_ids=IDS).logits)
    original = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert not torch.equal(model(input_ids=IDS).logits, original(input_ids=IDS).logits)
    assert model.generation_config.eos_token_id == saved.generation_config.eos_token_id


def test_a_depth_routed_checkpoint_with_another_residual_is_refused(routed_folder):
    said = refusal(load_pretrained, str(routed_folder), {"scheme": "delta_mhar", "block_layers": 2})
    assert "has the residual" in said
    assert "'block_layers': 1" in said
    assert "'block_layers': 2" in said


def damaged(source: Path, folder: Path, change) -> str:
    shutil.copytree(source, folder, dirs_exist_ok=True)
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")
    return str(folder)


@pytest.mark.parametrize("source", ["checkpoint", "routed_folder"])
def test_weights_that_are_not_exactly_the_models_are_refused(source, request, tmp_path):
    whole = request.getfixturevalue(source)
    missing = damaged(whole, tmp_path / "missing", lambda state: state.pop("model.norm.weight"))
    assert "'model.norm.weight' is missing" in refusal(load_pretrained, missing, RESIDUAL)
    unknown = damaged(whole, tmp_path / "unknown", lambda state: state.update(extra=torch.ones(1)))
    assert "unknown key 'extra'" in refusal(load_pretrained, unknown, RESIDUAL)
    short = damaged(whole, tmp_path / "short", lambda state: state.update({"model.norm.weight": torch.ones(3)}))
    assert "has shape [3]" in refusal(load_pretrained, short, RESIDUAL)


def test_a_routed_checkpoint_without_a_residual_key_is_refused(routed_folder, tmp_path):
    key = "model.residual.reads.1.query"
    folder = damaged(routed_folder, tmp_path, lambda state: state.pop(key))
    assert f"{key!r} is missing" in refusal(load_pretrained, folder, RESIDUAL)


def test_a_checkpoint_that_is_nowhere_is_named(tmp_path):
    missing = str(tmp_path / "nowhere")
    assert missing in refusal(load_pretrained, missing, RESIDUAL, error=FileNotFoundError)
    assert decoder_at_hand(missing) is None


def test_the_decoder_is_that_of_the_checkpoint(checkpoint, routed_folder):
    for folder in (checkpoint, routed_folder):
        assert decoder_at_hand(str(folder)).hidden_size == 16


def test_a_checkpoint_takes_the_place_of_the_preset(checkpoint, corpus):
    recipe = small_recipe(corpus, checkpoint=checkpoint)
    assert recipe.model.preset is None
    assert load_recipe(recipe.model_dump()) == recipe


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.preset=tiny", "model.preset is 'tiny' and model.checkpoint is"),
        ("model.decoder.hidden_size=8", "model.decoder is {'hidden_size': 8}, but should be empty"),
        ("residual={scheme: mhar, num_heads: 3}", "must divide hidden_size 16"),
        ("residual.scheme=delta_mahr", "did you mean 'delta_mhar'"),
    ],
)
def test_a_recipe_that_contradicts_its_checkpoint_is_refused_when_it_is_read(corpus, checkpoint, override, said):
    assert said in refusal(lambda: small_recipe(corpus, override, checkpoint=checkpoint))


@pytest.mark.parametrize(
    ("override", "said"), [("residual.scheme=mahr", "mhar"), ("residual={scheme: mhar, num_haeds: 2}", "num_heads")]
)
def test_a_scheme_is_checked_as_far_as_it_can_be_where_the_checkpoint_is_elsewhere(corpus, override, said):
    elsewhere = Path("somebody/a-model")
    small_recipe(corpus, checkpoint=elsewhere)
    assert said in refusal(lambda: small_recipe(corpus, override, checkpoint=elsewhere))


def test_the_tokenizer_is_the_checkpoints_where_none_is_given(corpus, checkpoint):
    recipe = small_recipe(corpus, checkpoint=checkpoint)
    assert recipe.data_with_tokenizer.tokenizer == str(checkpoint)
    assert recipe.data_with_tokenizer.model_copy(update={"tokenizer": "checkpoint"}) == recipe.data
    other = small_recipe(corpus, "data.tokenizer=embedded", checkpoint=checkpoint)
    assert other.data_with_tokenizer.tokenizer == "embedded"


def test_a_gguf_file_is_no_tokenizer(corpus):
    file = Path("model.gguf")
    small_recipe(corpus, checkpoint=file)
    said = refusal(lambda: small_recipe(corpus, "data.tokenizer=checkpoint", checkpoint=file))
    assert "model.checkpoint is a GGUF file" in said


def test_a_tokenizer_or_a_sequence_too_large_for_the_checkpoint_is_refused(corpus, tmp_path):
    tokenizer = load_tokenizer("embedded")
    small = write_checkpoint(tmp_path / "small", vocab_size=2000)
    said = refusal(build_model, small_recipe(corpus, checkpoint=small), tokenizer)
    assert re.search(r"data\.tokenizer 'checkpoint' has 2048 tokens, but model\.checkpoint .* only 2000", said)
    short = write_checkpoint(tmp_path / "short", max_position_embeddings=8)
    said = refusal(build_model, small_recipe(corpus, checkpoint=short), tokenizer)
    assert re.search(r"data\.sequence_length is 16, but model\.checkpoint .* only 8 positions", said)


def test_the_model_keeps_the_checkpoints_configuration(checkpoint, corpus):
    config = build_model(small_recipe(corpus, checkpoint=checkpoint), load_tokenizer("embedded")).config
    stored = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    for key in ("rms_norm_eps", "rope_parameters", "eos_token_id", "max_position_embeddings", "tie_word_embeddings"):
        assert getattr(config.decoder, key) == stored[key]
