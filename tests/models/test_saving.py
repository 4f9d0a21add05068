"""Nothing is lost on the way to a file and back."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from depthroute import DepthRoutedForCausalLM
from depthroute import residual as schemes
from support.models import FAMILIES, move_off_init, routed, stock, tokens


@pytest.mark.compat
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("scheme", schemes.available())
def test_a_saved_model_comes_back_bit_for_bit(scheme, tied, tmp_path):
    model = move_off_init(routed({"scheme": scheme}, tie_word_embeddings=tied))
    model.save_pretrained(tmp_path)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert isinstance(loaded, DepthRoutedForCausalLM)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(loaded.eval()(tokens()).logits, model(tokens()).logits)
    assert (loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()) == tied
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) == (not tied)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_comes_back(family, tmp_path):
    model = move_off_init(routed({"scheme": "mhar"}, family, tie_word_embeddings=False))
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.decoder.to_dict() == model.config.decoder.to_dict()
    assert config.residual == model.config.residual
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.eval()(tokens()).logits, model(tokens()).logits)


@pytest.mark.compat
@pytest.mark.parametrize("scheme", schemes.available())
def test_a_stock_checkpoint_leaves_the_scheme_at_its_initial_values(scheme, tmp_path):
    source = move_off_init(stock(tie_word_embeddings=False))
    fresh = routed({"scheme": scheme}, tie_word_embeddings=False)
    fresh.config.save_pretrained(tmp_path)
    save_file(
        {key: value.clone() for key, value in source.state_dict().items()},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert all(key.startswith("model.residual.") for key in report["missing_keys"])
    for key, value in loaded.state_dict().items():
        wanted = fresh.state_dict()[key] if key.startswith("model.residual.") else source.state_dict()[key]
        assert torch.equal(value, wanted), key


@pytest.mark.compat
@pytest.mark.parametrize("scheme", [scheme for scheme in schemes.available() if scheme != "additive"])
def test_one_missing_key_leaves_the_others_as_they_were_loaded(scheme, tmp_path):
    model = move_off_init(routed({"scheme": scheme}))
    initial = routed({"scheme": scheme}).state_dict()
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for lost in [key for key in weights if key.startswith("model.residual.")][:6]:
        save_file({k: v for k, v in weights.items() if k != lost}, tmp_path / "model.safetensors", {"format": "pt"})
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
        assert torch.equal(loaded[lost], initial[lost])
        assert all(torch.equal(loaded[key], weights[key]) for key in weights if key != lost)


def test_bf16_weights_come_back(tmp_path):
    model = move_off_init(routed({"scheme": "mhar"})).bfloat16()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    # Weights, not logits: `.bfloat16()` also rounds the rotary frequencies, which a loaded model keeps in fp32.
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in loaded.state_dict().items())


def test_a_model_built_on_the_meta_device_takes_the_weights():
    model = move_off_init(routed({"scheme": "hyper_connections"}))
    with torch.device("meta"):
        empty = DepthRoutedForCausalLM(model.config)
    assert all(parameter.is_meta for parameter in empty.parameters())
    empty.load_state_dict(model.state_dict(), assign=True)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in empty.state_dict().items())


def test_an_offloaded_scheme_is_told_with_what_is_wanted(tmp_path):
    routed({"scheme": "mhar"}).save_pretrained(tmp_path)
    places = {"model.embed_tokens": "cpu", "model.layers": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    places |= {"lm_head": "cpu", "model.residual": "disk"}
    model = DepthRoutedForCausalLM.from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path / "offloaded")
    with pytest.raises(RuntimeError, match=r"model\.residual is offloaded.*wanted a device for it"):
        model(input_ids=tokens())
