"""What comes along with the weights, from each kind of source."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaModel

from depthroute.convert import convert_checkpoint, sources
from depthroute.convert.key_maps import KEY_MAPS, KeyMap
from depthroute.models.configuration import SUPPORTED_DECODERS
from support.models import FAMILIES, tokens

DELTA = {"scheme": "delta_mhar"}


def same_weights(converted, original):
    ours, theirs = converted.state_dict(), original.state_dict()
    assert {key for key in ours if not key.startswith("model.residual.")} == set(theirs)
    assert all(torch.equal(ours[key], tensor) for key, tensor in theirs.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_in_the_configuration_is_carried_over(family, checkpoint):
    folder = checkpoint(family, tie_word_embeddings=False)
    original, converted = AutoModelForCausalLM.from_pretrained(folder), convert_checkpoint(folder, residual=DELTA)
    assert converted.config.decoder.to_dict() == original.config.to_dict()
    assert converted.config.decoder.rope_parameters["rope_theta"] == 5000.0
    assert converted.generation_config.to_dict() == original.generation_config.to_dict()
    assert converted.generation_config.eos_token_id == [2, 3]
    assert not converted.training
    same_weights(converted, original)


@pytest.mark.compat
def test_shards_are_read(checkpoint):
    folder = checkpoint(shard="60KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    same_weights(convert_checkpoint(str(folder), residual=DELTA), AutoModelForCausalLM.from_pretrained(folder))


def test_a_dtype_can_be_chosen(checkpoint):
    folder = checkpoint()
    for dtype in ("bfloat16", torch.bfloat16):
        converted = convert_checkpoint(folder, residual=DELTA, dtype=dtype)
        assert {parameter.dtype for parameter in converted.parameters()} == {torch.bfloat16}
        assert converted.config.dtype == converted.config.decoder.dtype == torch.bfloat16


def test_the_files_say_what_the_dtype_is(checkpoint):
    folder = checkpoint()
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    converted = convert_checkpoint(folder, residual=DELTA)
    assert converted.dtype == torch.float32
    assert torch.equal(converted.lm_head.weight, load_file(folder / "model.safetensors")["model.embed_tokens.weight"])


@pytest.mark.compat
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_loaded_model_is_copied_and_left_alone(tied, original):
    source = original("qwen2", tie_word_embeddings=tied)
    source.set_attn_implementation("eager")
    before = {key: tensor.clone() for key, tensor in source.state_dict().items()}
    wanted = source(tokens()).logits
    converted = convert_checkpoint(source, residual=DELTA)
    same_weights(converted, source)
    assert converted.config._attn_implementation == "eager"
    assert torch.equal(converted(tokens()).logits, wanted)
    with torch.no_grad():
        for parameter in converted.parameters():
            parameter.add_(1)
    converted.config.decoder.rms_norm_eps = 1.0
    converted.generation_config.max_new_tokens = 1
    assert all(torch.equal(source.state_dict()[key], tensor) for key, tensor in before.items())
    assert source.config.rms_norm_eps == 1e-5
    assert source.generation_config.max_new_tokens != 1


def test_no_random_numbers_are_drawn(checkpoint):
    folder = checkpoint()
    torch.manual_seed(0)
    wanted = torch.rand(1)
    torch.manual_seed(0)
    convert_checkpoint(folder, residual=DELTA)
    assert torch.equal(torch.rand(1), wanted)


def test_a_name_on_the_hub_is_its_local_copy(checkpoint, monkeypatch):
    folder, asked = checkpoint(), {}

    def download(name, allow_patterns):
        asked[name] = allow_patterns
        return str(folder)

    monkeypatch.setattr(sources, "snapshot_download", download)
    same_weights(convert_checkpoint("someone/llama", residual=DELTA), AutoModelForCausalLM.from_pretrained(folder))
    assert {"config.json", "generation_config.json", "model*.safetensors*"} <= set(asked["someone/llama"])


def test_a_name_that_is_nowhere_is_one_clear_line(monkeypatch):
    def download(name, allow_patterns):
        raise OSError("cannot reach\nthe hub")

    monkeypatch.setattr(sources, "snapshot_download", download)
    with pytest.raises(FileNotFoundError, match=r"someone/llama: neither a folder here .* \(cannot reach the hub\)"):
        convert_checkpoint("someone/llama", residual=DELTA)


def test_keys_that_can_be_computed_are_dropped(checkpoint):
    folder = checkpoint()
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, file, {"format": "pt"})
    same_weights(convert_checkpoint(folder, residual=DELTA), AutoModelForCausalLM.from_pretrained(folder))


def test_there_is_a_key_map_for_every_supported_decoder():
    assert set(KEY_MAPS) >= set(SUPPORTED_DECODERS)


def test_a_key_map_renames_by_the_first_pattern_that_matches_the_whole_key():
    key_map = KeyMap(renamed={r"h\.(\d+)\.q": r"layers.\1.query", r"h\..*": "other"}, dropped={"old": "unused"})
    assert [key_map.rename(key) for key in ("h.12.q", "h.12.qx", "xh.1.q")] == ["layers.12.query", "other", "xh.1.q"]
    assert (key_map.reason_to_drop("old"), key_map.reason_to_drop("older")) == ("unused", None)


@pytest.mark.parametrize("source", [None, 3, torch.nn.Linear(2, 2)], ids=["None", "number", "module"])
def test_a_source_of_another_type_is_refused(source):
    with pytest.raises(TypeError, match=f"source is {type(source).__name__}"):
        convert_checkpoint(source, residual=DELTA)


def test_loaded_models_that_are_no_stock_decoder_are_refused(original):
    source = original()
    with pytest.raises(ValueError, match="the loaded LlamaModel: it must be a LlamaForCausalLM"):
        convert_checkpoint(LlamaModel(source.config), residual=DELTA)
    with pytest.raises(ValueError, match="depth-routed already"):
        convert_checkpoint(convert_checkpoint(source, residual=DELTA), residual=DELTA)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(source.config)
    with pytest.raises(ValueError, match=r"'model.embed_tokens.weight' is on the meta device"):
        convert_checkpoint(empty, residual=DELTA)
    source.model.norm.weight.data = source.model.norm.weight.data.bfloat16()
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' has dtype bfloat16.*: choose one .* with dtype"):
        convert_checkpoint(source, residual=DELTA)


def test_a_folder_without_generation_configuration_takes_the_tokens_of_the_model(checkpoint):
    folder = checkpoint()
    (folder / "generation_config.json").unlink()
    assert convert_checkpoint(folder, residual=DELTA).generation_config.eos_token_id == 2


def test_only_pickled_weights_are_refused(checkpoint):
    folder = checkpoint()
    shutil.move(folder / "model.safetensors", folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor .*pytorch_model\.bin: save it as"):
        convert_checkpoint(folder, residual=DELTA)
