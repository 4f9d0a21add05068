"""From a checkpoint folder to a model folder, and nothing half-written on the way."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from depthroute import DepthRoutedForCausalLM
from depthroute.convert import check, convert_checkpoint, convert_folder, describe_conversion, folder, to_stock
from support.models import FAMILIES, tokens
from support.small_runs import end_of, kill_self, start

DELTA = {"scheme": "delta_mhar", "block_layers": 2}


def tensors(model_folder):
    return {key: value for file in model_folder.glob("*.safetensors") for key, value in load_file(file).items()}


@pytest.mark.compat
def test_the_folder_loads_as_any_other_and_holds_all_that_was_there(checkpoint, tmp_path):
    source, destination = checkpoint(tokenizer=True), tmp_path / "new" / "converted"
    (source / "LICENSE").write_text("free")
    record = convert_folder(source, str(destination), DELTA)
    loaded = AutoModelForCausalLM.from_pretrained(destination)
    assert isinstance(loaded, DepthRoutedForCausalLM)
    wanted = convert_checkpoint(source, residual=DELTA)
    assert all(torch.equal(value, wanted.state_dict()[key]) for key, value in loaded.state_dict().items())
    assert loaded.generation_config.to_dict() == wanted.generation_config.to_dict()
    text = "The house by the river, 1857."
    assert (
        AutoTokenizer.from_pretrained(destination)(text).input_ids
        == AutoTokenizer.from_pretrained(source)(text).input_ids
    )
    assert (destination / "LICENSE").read_text() == "free"
    assert json.loads((destination / "conversion.json").read_text()) == record
    assert [path.name for path in destination.parent.iterdir()] == ["converted"]


@pytest.mark.compat
def test_the_record_says_what_was_done_and_how_far_it_deviates(checkpoint, tmp_path):
    source = checkpoint(tokenizer=True)
    record = convert_folder(source, tmp_path / "converted", DELTA)
    assert record["source"] == "llama"
    assert str(tmp_path) not in json.dumps(record)
    assert (record["architecture"], record["dtype"], record["dropped_keys"]) == ("llama", "float32", {})
    assert record["residual"] == {**DELTA, "num_heads": "kv", "scale": 1.0, "eps": 1e-6, "backend": "auto"}
    assert record["residual_parameters"] == 6 * (3 * 64 + 1)
    found = record["check"]
    assert found["text"].startswith("the embedded corpus, validation documents")
    assert found["tokens"] == 4 * 256
    for precision in check.PRECISIONS:
        assert found[precision]["largest_absolute"] == found[precision]["largest_relative"] == 0.0
        assert found[precision]["same_top_token"] == 1.0
        assert found[precision]["loss_original"] == found[precision]["loss_converted"] > 0
    assert found["bf16"]["original_from_fp32"]["largest_absolute"] > 0
    assert found["greedy"]["equal"] == found["greedy"]["prompts"] == 4
    card = (tmp_path / "converted" / "README.md").read_text()
    assert "`delta_mhar`" in card
    assert "| bf16 autocast | 0 | 0 | 100.00% |" in card
    assert "fp32: largest logit deviation 0 (relative 0)" in describe_conversion(record)


def test_without_a_tokenizer_random_ids_are_compared_and_it_says_so(checkpoint, tmp_path):
    record = convert_folder(checkpoint(), tmp_path / "converted", {"scheme": "mhar", "read_scale": "sum"})
    assert record["check"]["text"].startswith("random token ids")
    assert "random token ids" in describe_conversion(record)
    assert 0 < record["check"]["fp32"]["largest_relative"] < 1e-5
    assert not (tmp_path / "converted" / "tokenizer.json").exists()


@pytest.mark.parametrize("scheme", ["mhar", "block_mhar"])
def test_reads_are_sums_unless_the_mean_is_asked_for(scheme, checkpoint, tmp_path):
    source = checkpoint()
    record = convert_folder(source, tmp_path / "sum", {"scheme": scheme})
    assert (record["residual"]["read_scale"], record["starts"]) == ("sum", "up_to_rounding")
    assert record["check"]["fp32"]["largest_relative"] < 1e-5
    assert "\nstarts as the original, up to rounding\n" in describe_conversion(record)
    assert convert_checkpoint(source, residual={"scheme": scheme}).config.residual == record["residual"]
    record = convert_folder(source, tmp_path / "mean", {"scheme": scheme, "read_scale": "mean"}, check=False)
    assert (record["residual"]["read_scale"], record["starts"]) == ("mean", "up_to_eps")


@pytest.mark.parametrize(
    ("residual", "starts", "said"),
    [
        ({"scheme": "additive"}, "exact", "starts as the original, bit for bit"),
        (DELTA, "exact", "starts as the original, bit for bit"),
        ({"scheme": "mhar", "read_scale": "mean"}, "up_to_eps", "does not start exactly as the original"),
        ({"scheme": "hyper_connections"}, "up_to_eps", "does not start exactly as the original"),
    ],
)
def test_it_says_whether_the_model_starts_as_the_original(residual, starts, said, checkpoint, tmp_path):
    record = convert_folder(checkpoint(), tmp_path / "converted", residual, check=False)
    assert record["starts"] == starts
    assert said in describe_conversion(record)
    assert said in (tmp_path / "converted" / "README.md").read_text()


def test_the_check_can_be_left_out(checkpoint, tmp_path):
    record = convert_folder(checkpoint(), tmp_path / "converted", DELTA, check=False)
    assert "check" not in record
    assert "not checked" in describe_conversion(record)
    assert "Not checked" in (tmp_path / "converted" / "README.md").read_text()


@pytest.mark.compat
def test_large_models_are_written_in_shards(checkpoint, tmp_path):
    source = checkpoint(shard="60KB")
    convert_folder(source, tmp_path / "converted", DELTA, check=False, max_shard_size="60KB")
    assert len(list((tmp_path / "converted").glob("model-*.safetensors"))) > 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
    assert torch.equal(loaded(tokens()).logits, AutoModelForCausalLM.from_pretrained(source)(tokens()).logits)


@pytest.mark.compat
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_stock_to_additive_to_stock_gives_the_same_files(family, tied, checkpoint, tmp_path):
    source = checkpoint(family, tie_word_embeddings=tied, dtype=torch.bfloat16)
    convert_folder(source, tmp_path / "additive", {"scheme": "additive"}, check=False)
    to_stock(AutoModelForCausalLM.from_pretrained(tmp_path / "additive")).save_pretrained(tmp_path / "back")
    before, after = tensors(source), tensors(tmp_path / "back")
    assert before.keys() == after.keys() == tensors(tmp_path / "additive").keys()
    assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)
    assert json.loads((source / "config.json").read_text()) == json.loads(
        (tmp_path / "back" / "config.json").read_text()
    )
    generation = "generation_config.json"
    assert json.loads((source / generation).read_text()) == json.loads((tmp_path / "back" / generation).read_text())


def test_a_folder_from_a_loaded_model(original, tmp_path):
    record = convert_folder(original("qwen3"), tmp_path / "converted", DELTA)
    assert record["source"] == "Qwen3ForCausalLM"
    assert record["check"]["fp32"]["largest_absolute"] == 0.0


def test_a_failure_at_the_end_leaves_nothing(checkpoint, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(folder, "conversion_card", fail)
    source = checkpoint()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OSError, match="disk full"):
        convert_folder(source, tmp_path / "converted", DELTA, check=False)
    assert sorted(tmp_path.iterdir()) == before


def test_a_scheme_that_should_be_exact_and_is_not_leaves_nothing(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(folder.checking, "compare", lambda *_: {"fp32": {"largest_absolute": 1e-7}})
    source = checkpoint()
    with pytest.raises(RuntimeError, match="deviates from the original by 1e-07 in fp32"):
        convert_folder(source, tmp_path / "converted", DELTA)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_kill_leaves_nothing_at_the_destination_and_the_next_conversion_cleans_up(checkpoint, tmp_path, monkeypatch):
    source, destination = checkpoint(), tmp_path / "converted"
    with monkeypatch.context() as patch:
        patch.setattr(folder.checking, "compare", lambda *_: kill_self())
        assert end_of(start(lambda: convert_folder(source, destination, DELTA))) == -9
    assert not destination.exists()
    assert (tmp_path / ".converted.partial").is_dir()
    convert_folder(source, destination, DELTA, check=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["converted", "source"]


def test_a_tokenizer_whose_class_depends_on_the_model_type_gives_the_same_ids(checkpoint, tmp_path):
    source = checkpoint("qwen2", tokenizer=True)
    # With this class transformers looks at the model type too: for Qwen2 it takes Qwen2's own, with other normalising.
    for name, values in (
        ("tokenizer_config.json", {"tokenizer_class": "LlamaTokenizerFast"}),
        ("tokenizer.json", {"normalizer": {"type": "Lowercase"}}),
    ):
        (source / name).write_text(json.dumps(json.loads((source / name).read_text()) | values))
    wanted = AutoTokenizer.from_pretrained(source)("The House").input_ids
    assert wanted != PreTrainedTokenizerFast.from_pretrained(source)("The House").input_ids
    convert_folder(source, tmp_path / "converted", DELTA, check=False)
    assert AutoTokenizer.from_pretrained(tmp_path / "converted")("The House").input_ids == wanted


def test_a_tokenizer_that_cannot_be_loaded_is_refused(checkpoint, tmp_path):
    source = checkpoint(tokenizer=True)
    (source / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="llama: its tokenizer cannot be loaded"):
        convert_folder(source, tmp_path / "converted", DELTA)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
