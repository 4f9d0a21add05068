"""Saved models are read whole or not at all, and what is not there is named."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from depthroute.data import load_tokenizer
from depthroute.models import DepthRoutedForCausalLM
from depthroute.models.saved import load_saved
from depthroute.models.text import generate_text
from support.models import routed


@pytest.fixture
def folder(tmp_path):
    routed({"scheme": "mhar"}, vocab_size=2048).save_pretrained(tmp_path)
    load_tokenizer("embedded").save_pretrained(tmp_path)
    return tmp_path


def lose(folder, *keys):
    file = folder / "model.safetensors"
    save_file({key: value for key, value in load_file(file).items() if key not in keys}, file, {"format": "pt"})


def test_text_goes_on_from_a_prompt(folder):
    assert generate_text(folder, "The sea", max_new_tokens=5, temperature=0)


def test_the_first_new_word_keeps_its_space(tmp_path):
    words = ["\N{LOWER ONE EIGHTH BLOCK}" + word for word in ("the", "sea", "was", "calm")]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert fast.decode([2]) == "was"  # what a text alone loses
    fast.save_pretrained(tmp_path)
    routed({"scheme": "additive"}, vocab_size=len(words)).save_pretrained(tmp_path)
    found = generate_text(tmp_path, "the sea", max_new_tokens=2, temperature=0)
    assert found.startswith(" ")
    assert len(found.split()) == 2


def test_nothing_is_cut_that_was_not_asked_for(folder, monkeypatch):
    given = {}

    def generate(self, ids, **options):
        given.update(self.generation_config.to_diff_dict(), **options)
        return ids

    monkeypatch.setattr(DepthRoutedForCausalLM, "generate", generate)
    generate_text(folder, "The sea", temperature=1, top_p=1)
    assert (given["top_k"], given["top_p"], given["temperature"]) == (0, 1, 1)  # transformers' own top_k is 50


def test_no_text_goes_beyond_the_positions_of_the_model(folder):
    positions = load_saved(folder).config.max_position_embeddings
    with pytest.raises(ValueError, match=rf"max_new_tokens is {positions}, but the model has {positions} positions"):
        generate_text(folder, "The sea", max_new_tokens=positions)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 1.1),
        ("top_p", float("nan")),
        ("seed", -1),
        ("seed", 2**32),
    ],
)
def test_settings_out_of_range_are_named_before_a_model_is_looked_for(name, value):
    with pytest.raises(ValueError, match=rf"{name} is {value}; wanted"):
        generate_text("nowhere/at-all", "The sea", **{name: value})


@pytest.mark.parametrize("options", [{}, {"device_map": "meta"}], ids=["read", "checked"])
def test_a_model_that_lacks_weights_is_refused(folder, options):
    load_saved(folder, **options)
    lose(folder, "model.residual.reads.1.query", "model.layers.2.mlp.up_proj.weight")
    with pytest.raises(ValueError, match=r"its weights lack 'model\.layers\.2\.mlp\.up_proj\.weight' \(and 1 more\)"):
        load_saved(folder, **options)


@pytest.mark.parametrize("options", [{}, {"device_map": "meta"}], ids=["read", "checked"])
def test_a_damaged_file_is_refused(folder, options):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ValueError, match="its weights are not a whole safetensors file"):
        load_saved(folder, **options)


def test_a_model_without_a_tokenizer_is_refused(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(FileNotFoundError, match="has no tokenizer beside it"):
        generate_text(folder, "The sea")


def test_a_name_that_is_nowhere_is_named(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="nowhere/at-all: neither a folder here nor a model of the hub"):
        generate_text("nowhere/at-all", "The sea")
