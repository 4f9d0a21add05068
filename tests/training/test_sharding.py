"""FSDP2: what is cut and how, and what is refused. That shards compute the same is shown in test_distributed.py."""

from __future__ import annotations

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin

from depthroute.training import hf_trainer, load_recipe, sharding
from depthroute.training.hf_trainer import shards_the_model
from depthroute.training.sharding import mesh_of, placed_like, reshard, whole
from support.models import routed

SMALL = {"name": "small", "optimizer": {"warmup_steps": 1}, "training": {"steps": 2}}


def test_fsdp1_is_refused():
    with pytest.raises(ValueError, match="fsdp_version is 1, but should be 2"):
        hf_trainer._check_plugin(FullyShardedDataParallelPlugin(fsdp_version=1))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"activation_checkpointing": True}, "wanted training.gradient_checkpointing=true instead"),
        ({"cpu_offload": True}, "fsdp_offload_params is true"),
    ],
)
def test_what_is_not_done_here_is_refused(asked, said):
    with pytest.raises(ValueError, match=said):
        hf_trainer._check_plugin(FullyShardedDataParallelPlugin(fsdp_version=2, **asked))


def test_rounded_weights_want_rounded_arithmetic():
    with pytest.raises(ValueError, match="gather_precision is 'bf16', but should be 'fp32'"):
        load_recipe(SMALL, ["training.gather_precision=bf16"])
    assert load_recipe(SMALL, ["training.gather_precision=bf16", "training.precision=bf16"])


@pytest.mark.parametrize("asks", ["recipe", "accelerate", None])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_is_sharded_where_that_was_asked_and_there_are_several_devices(monkeypatch, asks, ranks):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true" if asks == "accelerate" else "false")
    recipe = load_recipe(SMALL, ["training.sharding=full"] if asks == "recipe" else [])
    assert shards_the_model(recipe) == (asks is not None and ranks == 2)


def test_hybrid_shard_wants_as_many_processes_on_every_host(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 6)
    with pytest.raises(ValueError, match="'hybrid', but 6 processes are not 4 on every host"):
        mesh_of("hybrid", "cpu")


@pytest.mark.parametrize(("scheme", "parts"), [("additive", 1), ("delta_mhar", 1), ("mhar", 2), ("block_mhar", 2)])
def test_small_layers_share_a_unit_and_there_are_eight_of_these_at_least(scheme, parts):
    model = routed({"scheme": scheme}, num_hidden_layers=19)
    assert [len(unit) for unit in sharding.units(model)] == [2 * parts] * 9 + [parts]
    del model.model.layers[15:]
    assert [len(unit) for unit in sharding.units(model)] == [parts] * 15


def test_a_large_layer_is_a_unit_alone(monkeypatch):
    model = routed({"scheme": "mhar"}, num_hidden_layers=16)
    layers = model.model.layers
    size = sum(parameter.numel() for parameter in layers[0].parameters())
    monkeypatch.setattr(sharding, "UNIT_PARAMETERS", 2 * size)
    assert sharding.units(model)[1] == [layers[2].self_attn, layers[2].mlp, layers[3].self_attn, layers[3].mlp]
    monkeypatch.setattr(sharding, "UNIT_PARAMETERS", size - 1)
    assert sharding.units(model)[1] == [layers[1].self_attn, layers[1].mlp]


def test_plain_tensors_stay_as_they_are():
    tensor = torch.ones(3)
    assert whole(tensor) is tensor
    assert placed_like(tensor, torch.zeros(3)) is tensor
    reshard(torch.nn.Linear(2, 2))
