"""Configurations say at once what is wrong with them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import depthroute
from depthroute import DepthRoutedConfig, DepthRoutedForCausalLM
from depthroute.models import presets
from depthroute.models.decoder import DepthRoutedDecoderLayer
from support.models import decoder, routed, stock, tokens

pytestmark = pytest.mark.compat


def test_a_model_of_a_decoder_alone_is_refused():
    with pytest.raises(TypeError, match=r"config is a Qwen3Config, but must be a DepthRoutedConfig"):
        DepthRoutedForCausalLM(decoder())


@pytest.mark.parametrize(
    ("residual", "error", "message"),
    [
        ({"scheme": ["mhar"]}, TypeError, r"residual\.scheme is \['mhar'\], but must be one of additive"),
        ({"scheme": "mhra"}, ValueError, "unknown scheme 'mhra'; did you mean 'mhar'"),
        ({"num_heads": 2}, ValueError, "residual has no 'scheme'"),
        ("mhar", TypeError, "must be a mapping"),
        (
            {"scheme": "mhar", "num_head": 2},
            ValueError,
            "unknown key 'num_head' for scheme 'mhar'; did you mean 'num_heads'",
        ),
        ({"scheme": "additive", "num_heads": 2}, ValueError, "unknown key 'num_heads' for scheme 'additive'"),
        ({"scheme": "mhar", "num_heads": 3}, ValueError, "num_heads is 3 .* must divide hidden_size 64"),
        ({"scheme": "block_mhar", "num_heads": 3}, ValueError, "num_heads is 3 .* must divide hidden_size 64"),
        ({"scheme": "mhar", "num_heads": 0}, ValueError, "num_heads is 0, but must be a whole number >= 1 or 'kv'"),
        ({"scheme": "mhar", "num_heads": "all"}, ValueError, "num_heads is 'all'"),
        ({"scheme": "mhar", "num_heads": 2.0}, TypeError, "num_heads is 2.0"),
        ({"scheme": "mhar", "scale": -1}, ValueError, "scale is -1, but must be a number > 0"),
        ({"scheme": "mhar", "scale": float("nan")}, ValueError, "scale is nan"),
        ({"scheme": "mhar", "scale": "big"}, TypeError, "scale is 'big'"),
        ({"scheme": "mhar", "eps": 0.0}, ValueError, "eps is 0.0"),
        (
            {"scheme": "mhar", "read_scale": "median"},
            ValueError,
            "read_scale is 'median', but must be one of 'mean', 'sum'",
        ),
        ({"scheme": "mhar", "backend": "cuda"}, ValueError, "backend is 'cuda'"),
        ({"scheme": "block_mhar", "block_layers": 0}, ValueError, "block_layers is 0"),
        ({"scheme": "hyper_connections", "num_streams": 0}, ValueError, "num_streams is 0"),
        ({"scheme": "denseformer", "period": 9}, ValueError, "period is 9, but must be at most the 3 layers"),
        ({"scheme": "mhc", "iterations": 0}, ValueError, "iterations is 0"),
        ({"scheme": "hyper_connections", "dynamic": "yes"}, TypeError, "dynamic is 'yes', but must be true or false"),
    ],
)
def test_a_wrong_residual_is_refused(residual, error, message):
    with pytest.raises(error, match=message) as info:
        DepthRoutedConfig(decoder=decoder(), residual=residual)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize("model_type", ["gemma2", "olmo2", "gpt2", "minimax", None])
def test_a_decoder_that_is_not_on_the_list_is_refused(model_type):
    with pytest.raises(ValueError, match=r"decoder.model_type is .* must be one of llama, mistral, qwen2, qwen3"):
        DepthRoutedConfig(decoder={"model_type": model_type})
    with pytest.raises(TypeError, match="decoder is str"):
        DepthRoutedConfig(decoder="qwen3")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"residul": {"scheme": "mhar"}}, "unknown argument 'residul'; did you mean 'residual'"),
        ({"decoders": {}}, "unknown argument 'decoders'; did you mean 'decoder'"),
        ({"num_heads": 8}, "'num_heads' belongs into residual="),
        ({"scheme": "mhar"}, "'scheme' belongs into residual="),
    ],
)
def test_a_misspelt_argument_does_not_quietly_give_the_plain_model(arguments, message):
    with pytest.raises(ValueError, match=message):
        DepthRoutedConfig(decoder=decoder(), **arguments)


def test_a_misspelt_field_of_the_decoder_is_refused_and_one_of_another_version_is_not():
    values = decoder().to_dict()
    with pytest.raises(ValueError, match="decoder: unknown field 'hidden_sise'; did you mean 'hidden_size'"):
        DepthRoutedConfig(decoder={**values, "hidden_sise": 64})
    kept = DepthRoutedConfig(decoder={**values, "rope_theta_of_another_version": 1.0, "tie_encoder_decoder": False})
    assert kept.decoder.rope_theta_of_another_version == 1.0


def test_a_file_with_a_field_of_another_version_loads(tmp_path):
    config = DepthRoutedConfig(decoder=decoder(), residual={"scheme": "mhar"})
    config.decoder.eos_token_ids = [1, 2]
    config.save_pretrained(tmp_path)
    assert DepthRoutedConfig.from_pretrained(tmp_path).decoder.eos_token_ids == [1, 2]


def test_a_decoder_that_reads_both_ways_is_refused():
    with pytest.raises(ValueError, match=r"decoder\.is_causal is False"):
        DepthRoutedConfig(decoder={**decoder().to_dict(), "is_causal": False})


def test_a_stock_checkpoint_is_not_taken_for_a_routed_one(tmp_path):
    stock("llama").save_pretrained(tmp_path)
    for load in (DepthRoutedConfig.from_pretrained, DepthRoutedForCausalLM.from_pretrained):
        with pytest.raises(ValueError, match=r"model_type is 'llama', but must be 'depthroute'; .*convert_checkpoint"):
            load(tmp_path)


def test_an_unexpected_module_is_refused():
    layer = nn.Module()
    layer.self_attn = layer.mlp = layer.input_layernorm = layer.post_attention_layernorm = nn.Identity()
    layer.post_feedforward_layernorm = nn.Identity()
    with pytest.raises(ValueError, match="post_feedforward_layernorm"):
        DepthRoutedDecoderLayer(layer, 0)


def test_defaults_are_written_out_and_survive_the_dictionary():
    config = DepthRoutedConfig(decoder=decoder(), residual={"scheme": "mhar"})
    assert config.residual == {
        "scheme": "mhar",
        "num_heads": "kv",
        "scale": 1.0,
        "eps": 1e-6,
        "backend": "auto",
        "read_scale": "mean",
    }
    again = AutoConfig.for_model("depthroute", **{k: v for k, v in config.to_dict().items() if k != "model_type"})
    assert again.to_dict() == config.to_dict()
    assert DepthRoutedConfig(decoder=decoder()).residual == {"scheme": "additive"}


def test_the_decoder_answers_for_the_whole():
    config = DepthRoutedConfig(decoder=decoder("llama"))
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (131, 64, 3)
    assert (config.num_attention_heads, config.num_key_value_heads, config.max_position_embeddings) == (4, 2, 256)
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)
    assert config.get_text_config() is config.decoder
    config.use_cache = False
    assert config.decoder.use_cache is False


def test_num_heads_kv_is_the_number_of_kv_heads():
    reads = routed({"scheme": "mhar", "num_heads": "kv"}).model.residual.reads
    assert len(reads) == 6
    assert {read.num_heads for read in reads} == {2}


@pytest.mark.parametrize(
    "pair",
    [
        ({"num_heads": 1}, {"num_heads": 4}),
        ({"scale": 1.0}, {"scale": 0.5}),
        ({"eps": 1e-6}, {"eps": 1e-1}),
        ({"read_scale": "mean"}, {"read_scale": "sum"}),
        ({"scheme": "block_mhar", "block_layers": 1}, {"scheme": "block_mhar", "block_layers": 2}),
        (
            {"scheme": "hyper_connections", "num_streams": 2, "dynamic": False},
            {"scheme": "hyper_connections", "num_streams": 4, "dynamic": False},
        ),
        ({"scheme": "denseformer"}, {"scheme": "denseformer", "period": 2}),
        ({"scheme": "denseformer"}, {"scheme": "denseformer", "dilation": 2}),
        ({"scheme": "mhc", "iterations": 1}, {"scheme": "mhc", "iterations": 20}),
        ({"scheme": "delta_mhar"}, {"scheme": "delta_mhar", "block_layers": 1}),
        ({"scheme": "hyper_connections"}, {"scheme": "hyper_connections", "dynamic": False}),
    ],
    ids=str,
)
def test_every_option_changes_the_function(pair):
    logits = []
    for options in pair:
        model = routed({"scheme": "mhar", **options}, initializer_range=0.3)
        with torch.no_grad():
            for key, parameter in model.model.residual.named_parameters():
                torch.manual_seed(len(key))
                parameter.add_(torch.randn(parameter.shape[-1]))
        logits.append(model(tokens()).logits)
    assert (logits[0] - logits[1]).abs().max() > 1e-4


@pytest.mark.parametrize(("name", "millions"), [("100m", 116), ("124m", 199), ("350m", 533), ("1b", 1079)])
def test_presets_hold_the_parameters_of_the_paper(name, millions):
    config = DepthRoutedConfig(decoder=presets.decoder_config(name), residual={"scheme": "mhar"})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert round(model.num_parameters() / 1e6) == millions


def test_preset_overrides():
    config = presets.decoder_config("tiny", vocab_size=300, num_hidden_layers=2)
    assert (config.vocab_size, config.num_hidden_layers, len(config.layer_types)) == (300, 2, 2)
    with pytest.raises(ValueError, match="unknown preset 'tinny'; did you mean 'tiny'"):
        presets.decoder_config("tinny")
    with pytest.raises(ValueError, match="unknown field 'vocabsize'; did you mean 'vocab_size'"):
        presets.decoder_config("tiny", vocabsize=3)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"hidden_size": 0}, "decoder.hidden_size is 0, but must be a whole number >= 1"),
        ({"num_hidden_layers": 0}, "decoder.num_hidden_layers is 0, but must be a whole number >= 1"),
        ({"num_hidden_layers": -1}, "decoder.num_hidden_layers is -1, but must be a whole number >= 1"),
        ({"num_key_value_heads": 0}, "decoder.num_key_value_heads is 0, but must be a whole number >= 1"),
        ({"intermediate_size": 0}, "decoder.intermediate_size is 0, but must be a whole number >= 1"),
        ({"hidden_size": 12.5}, "field 'hidden_size'"),
        ({"num_attention_heads": 7}, "decoder.num_attention_heads is 7, but must be a multiple of num_key_value_heads"),
        ({"head_dim": 15}, "decoder.head_dim is 15, but must be even"),
        ({"rms_norm_eps": float("nan")}, "decoder.rms_norm_eps is nan, but must be a finite number"),
        ({"rms_norm_eps": -1.0}, "decoder.rms_norm_eps is -1.0, but must be a number > 0"),
        ({"rms_norm_eps": 1}, "field 'rms_norm_eps'"),
        ({"hidden_act": "silo"}, "decoder.hidden_act: unknown 'silo'; did you mean 'silu'?"),
    ],
)
def test_values_that_no_decoder_can_have_are_refused(overrides, said):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        presets.decoder_config("tiny", **overrides)
    assert said in str(caught.value)


def test_the_package_names_what_it_offers():
    assert {"additive", "mhar", "block_mhar", "hyper_connections"} <= set(depthroute.residual.available())
    assert set(depthroute.__all__) <= set(dir(depthroute))
