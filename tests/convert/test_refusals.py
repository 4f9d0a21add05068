"""A checkpoint that is not right is refused with one line that names the file and the key, and leaves nothing."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from depthroute.convert import convert_folder

DELTA = {"scheme": "delta_mhar"}


def edit_weights(edit):
    def damage(folder):
        weights = load_file(folder / "model.safetensors")
        edit(weights)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    return damage


def edit_json(name, edit):
    def damage(folder):
        values = json.loads((folder / name).read_text())
        edit(values)
        (folder / name).write_text(json.dumps(values))

    return damage


def set_config(**values):
    return edit_json("config.json", lambda config: config.update(values))


def truncate(name):
    def damage(folder):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return damage


def promise(index):
    index["weight_map"]["model.layers.0.gone.weight"] = "model-00001-of-00005.safetensors"


def tie_another_head(weights):
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1


def key(name, value):
    return edit_weights(lambda weights: weights.update({name: value}))


UP = "model.layers.1.mlp.up_proj.weight"
DAMAGES = {
    "missing key": (
        edit_weights(lambda weights: weights.pop(UP)),
        rf"model\.safetensors: key '{UP}' is missing: LlamaForCausalLM needs it",
    ),
    "unknown key": (
        key("model.layers.1.mlp.up_prj.weight", torch.ones(2)),
        r"model\.safetensors: unknown key 'model\.layers\.1\.mlp\.up_prj\.weight'.*did you mean '.*up_proj\.weight'",
    ),
    "wrong shape": (key(UP, torch.ones(3, 4)), rf"model\.safetensors: key '{UP}' has shape \[3, 4\].*wants \[96, 64\]"),
    "more layers": (set_config(num_hidden_layers=4), r"key 'model\.layers\.3\..*' \(and \d+ more\) is missing"),
    "quantised tensor": (key(UP, torch.ones(96, 64).to(torch.int8)), rf"'{UP}' has dtype I8: only float64"),
    "quantised model": (set_config(quantization_config={"quant_method": "fp8"}), r"config\.json: quantization_config"),
    "several dtypes": (
        key(UP, torch.ones(96, 64).half()),
        rf"safetensors: key '{UP}' has dtype float16, but .*dtype",
    ),
    "another head": (edit_weights(tie_another_head), "'lm_head.weight' differs from 'model.embed_tokens.weight'"),
    "truncated file": (truncate("model.safetensors"), r"model\.safetensors: not a whole safetensors file"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), r"neither model\.safetensors nor"),
    "not pre-norm": (set_config(model_type="olmo2"), r"config\.json: model_type is 'olmo2', but must be one of llama,"),
    "other maths": (set_config(model_type="minimax"), r"config\.json: model_type is 'minimax'"),
    "routed already": (set_config(model_type="depthroute"), r"config\.json: the model is depth-routed already"),
    "no model type": (edit_json("config.json", lambda config: config.pop("model_type")), "model_type is None"),
    "damaged configuration": (truncate("config.json"), r"config\.json: "),
    "wrong configuration": (set_config(hidden_size="wide"), r"config\.json: .*hidden_size"),
    "no configuration": (lambda folder: (folder / "config.json").unlink(), r"config\.json: no such file"),
    "adapter": (
        lambda folder: (folder / "adapter_config.json").write_text("{}"),
        r"config\.json: adapter_config\.json",
    ),
}
SHARDED = {
    "truncated shard": (truncate("model-00002-of-00005.safetensors"), "00002-of-00005.safetensors: not a whole"),
    "missing shard": (
        lambda folder: (folder / "model-00003-of-00005.safetensors").unlink(),
        r"model-00003-of-00005\.safetensors: this shard is missing; model\.safetensors\.index\.json names it",
    ),
    "broken promise": (
        edit_json("model.safetensors.index.json", promise),
        r"model-00001-of-00005\.safetensors: key 'model\.layers\.0\.gone\.weight' is missing",
    ),
    "key in two shards": (
        lambda folder: (folder / "model-00004-of-00005.safetensors").write_bytes(
            (folder / "model-00005-of-00005.safetensors").read_bytes()
        ),
        r"model-00005-of-00005\.safetensors: key '.*' is also in .*model-00004-of-00005",
    ),
    "damaged index": (truncate("model.safetensors.index.json"), r"index\.json: not an index of shards"),
    "empty index": (edit_json("model.safetensors.index.json", lambda index: index["weight_map"].clear()), "is empty"),
}


def assert_refused(source, destination, wanted, residual=DELTA, **options):
    before = sorted(destination.parent.iterdir())
    with pytest.raises((ValueError, FileNotFoundError), match=wanted) as caught:
        convert_folder(source, destination, residual, **options)
    assert "\n" not in str(caught.value)
    assert sorted(destination.parent.iterdir()) == before


@pytest.mark.compat
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder(damage, checkpoint, tmp_path):
    folder = checkpoint(mlp_bias=False)
    spoil, wanted = DAMAGES[damage]
    spoil(folder)
    assert_refused(folder, tmp_path / "converted", wanted)


@pytest.mark.compat
@pytest.mark.parametrize("damage", SHARDED)
def test_damaged_shards(damage, checkpoint, tmp_path):
    folder = checkpoint(shard="100KB")
    assert len(list(folder.glob("model-*-of-00005.safetensors"))) == 5
    spoil, wanted = SHARDED[damage]
    spoil(folder)
    assert_refused(folder, tmp_path / "converted", wanted)


def test_a_folder_that_is_not_there(tmp_path):
    assert_refused(tmp_path / "gone", tmp_path / "converted", "gone: no such folder or file")
    assert_refused(str(tmp_path / "gone"), tmp_path / "converted", "gone: no such folder or file")


def test_a_file_of_another_kind(tmp_path):
    (tmp_path / "model.txt").write_text("no model")
    assert_refused(tmp_path / "model.txt", tmp_path / "converted", r"model\.txt: this file is no checkpoint")


def test_a_model_that_is_routed_already(checkpoint, tmp_path):
    convert_folder(checkpoint(), tmp_path / "routed", DELTA, check=False)
    assert_refused(
        tmp_path / "routed", tmp_path / "converted", r"routed already; depthroute\.convert\.to_stock\(model\)"
    )


def test_schemes_options_and_dtypes_that_do_not_exist(checkpoint, tmp_path):
    folder, destination = checkpoint(), tmp_path / "converted"
    assert_refused(
        folder, destination, "unknown scheme 'delta_mha'; did you mean 'delta_mhar'", {"scheme": "delta_mha"}
    )
    assert_refused(folder, destination, "did you mean 'block_layers'", DELTA | {"block_layer": 4})
    assert_refused(folder, destination, "must divide hidden_size 64", DELTA | {"num_heads": 5})
    assert_refused(folder, destination, "unknown dtype 'bfloat'; did you mean 'bfloat16'", dtype="bfloat")
    assert_refused(folder, destination, "dtype is torch.int8", dtype=torch.int8)
    with pytest.raises(TypeError, match="dtype is int"):
        convert_folder(folder, destination, DELTA, dtype=16)
    assert not destination.exists()


def test_a_destination_that_holds_something_is_left_alone(checkpoint, tmp_path):
    folder, destination = checkpoint(), tmp_path / "converted"
    destination.mkdir()
    (destination / "mine").write_text("keep")
    assert_refused(folder, destination, "converted: destination is not empty")
    assert (destination / "mine").read_text() == "keep"
    assert_refused(folder, destination / "mine", "mine: destination is a file")
