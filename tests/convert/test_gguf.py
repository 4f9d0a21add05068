"""GGUF files: what transformers reads well is converted, what it would read wrongly is refused."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoTokenizer

from depthroute.convert import convert_checkpoint, convert_folder
from depthroute.data import load_tokenizer
from support.models import tokens

gguf = pytest.importorskip("gguf", reason="needs the package gguf: pip install gguf")

pytestmark = pytest.mark.compat

DELTA = {"scheme": "delta_mhar"}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(key):
    name = key.replace("model.layers", "blk")
    for ours, theirs in NAMES.items():
        name = name.replace(f"{ours}.", f"{theirs}.")
    return name


def interleaved(weight, heads):
    """Rows of Q or K in the order of GGUF, whose rotary pairs are neighbours; ours are half a head apart."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write(path, model, *, architecture="llama", metadata=(), tensors=(), tokenizer=None):
    config = model.config
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer)
    for key, value in metadata:
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for key, weight in model.state_dict().items():
        if "q_proj" in key or "k_proj" in key:
            weight = interleaved(weight, config.num_attention_heads if "q_proj" in key else config.num_key_value_heads)
        if key != "lm_head.weight" or not config.tie_word_embeddings:
            writer.add_tensor(gguf_name(key), weight.numpy())
    for key, weight in tensors:
        writer.add_tensor(key, weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer, tokenizer):
    """The byte-level tokenizer, with an end of text that is not its last resort and a beginning that is another."""
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    vocabulary = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    writer.add_token_list(vocabulary)
    special = set(tokenizer.all_special_tokens)
    writer.add_token_types([3 if token in special else 1 for token in vocabulary])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_unk_token_id(1)
    writer.add_pad_token_id(1)


@pytest.fixture
def source(original):
    return lambda **overrides: original(attention_bias=False, mlp_bias=False, **overrides)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_model_of_the_file_is_converted(tied, source, tmp_path):
    model = source(tie_word_embeddings=tied)
    converted = convert_checkpoint(write(tmp_path / "tiny.gguf", model), residual=DELTA)
    weights = converted.state_dict()
    assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())
    assert converted.config.decoder.rope_parameters["rope_theta"] == 5000.0
    assert converted.config.decoder.rms_norm_eps == pytest.approx(1e-5)
    assert converted.config.tie_word_embeddings == tied
    assert "quantization_config" not in converted.config.decoder.to_dict()
    assert torch.equal(converted(tokens()).logits, model(tokens()).logits)


def test_the_tokenizer_comes_along(source, tmp_path):
    embedded = load_tokenizer("embedded")
    path = write(tmp_path / "tiny.gguf", source(vocab_size=len(embedded)), tokenizer=embedded)
    record = convert_folder(path, tmp_path / "converted", DELTA)
    assert record["source"] == "tiny.gguf"
    assert record["check"]["text"].startswith("the embedded corpus")
    assert record["check"]["fp32"]["largest_absolute"] == 0.0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "converted")
    first = embedded.convert_ids_to_tokens(1)
    assert (tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token) == (embedded.eos_token, first, first)
    assert tokenizer(" old house").input_ids == embedded(" old house").input_ids
    # The kind "smollm" cuts at every digit before anything else, so the line breaks before one stay together.
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a\n\n18")
    assert [piece for piece, _ in pieces] == ["a", "ĊĊ", "1", "8"]


@pytest.mark.parametrize(
    ("contents", "wanted"),
    [
        ({"architecture": "gemma2"}, r"tiny\.gguf: model_type is 'gemma2', but must be one of"),
        ({"metadata": [("llama.rope.scaling.factor", 8.0)]}, r"llama\.rope\.scaling\.factor is set, which transf"),
        ({"metadata": [("llama.attention.sliding_window", 64)]}, r"llama\.attention\.sliding_window is set"),
        ({"tensors": [("rope_freqs.weight", torch.ones(8))]}, "holds 30 tensors, but LlamaForCausalLM takes 29"),
    ],
    ids=["architecture", "scaled rope", "sliding window", "tensors without a place"],
)
def test_what_would_be_read_wrongly_is_refused(contents, wanted, source, tmp_path):
    path = write(tmp_path / "tiny.gguf", source(), **contents)
    with pytest.raises(ValueError, match=wanted):
        convert_folder(path, tmp_path / "converted", DELTA)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


@pytest.mark.parametrize("part", [0.0, 0.001, 0.5], ids=["empty", "in the header", "in the tensors"])
def test_a_file_that_was_cut_off_is_refused(part, source, tmp_path):
    path = write(tmp_path / "tiny.gguf", source())
    content = path.read_bytes()
    path.write_bytes(content[: int(part * len(content))])
    with pytest.raises(ValueError, match=r"tiny\.gguf: ") as caught:
        convert_folder(path, tmp_path / "converted", DELTA)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "converted").exists()
