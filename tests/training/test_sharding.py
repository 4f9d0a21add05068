"""FSDP2: what is cut and how, and what is refused. That shards compute the same is shown in test_distributed.py."""

from __future__ import annotations

import os

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import fully_shard

from depthroute.training import hf_trainer, load_recipe, sharding
from depthroute.training.hf_trainer import shards_the_model
from depthroute.training.optim import build_optimizer
from depthroute.training.recipe import OptimizerRecipe
from depthroute.training.sharding import clip_grad_norm_, mesh_of, placed_like, reshard, shard, whole
from support.models import routed
from support.small_runs import as_ranks

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


@pytest.mark.parametrize(("ranks", "kind"), [(2, "full"), (4, "hybrid")])
def test_shards_are_clipped_and_stepped_as_whole_tensors_are(ranks, kind):
    def work(_: int) -> None:
        torch.distributed.init_process_group("gloo")
        os.environ["LOCAL_WORLD_SIZE"] = "2"
        torch.manual_seed(0)
        # In fp64: a step of AdamW makes rounding of a gradient that is nearly zero as large as any other.
        model, other = routed({"scheme": "mhar"}).double(), routed({"scheme": "mhar"}).double()
        other.load_state_dict(model.state_dict())
        shard(model, mesh_of(kind, "cpu"))
        ids = torch.randint(64, (1, 8))
        optimizers = [build_optimizer(each, OptimizerRecipe(learning_rate=0.1)) for each in (model, other)]
        for most in (0.1, 1e6):
            norms = []
            for each, optimizer in zip((model, other), optimizers, strict=True):
                each(input_ids=ids, labels=ids).loss.backward()
                clip = torch.nn.utils.clip_grad_norm_ if each is other else clip_grad_norm_
                norms.append(clip(each.parameters(), most))
                optimizer.step()
                optimizer.zero_grad()
            torch.testing.assert_close(*norms, rtol=1e-9, atol=0)
        moments = optimizers[0].state[model.lm_head.weight]["exp_avg"]
        assert moments.placements == model.lm_head.weight.placements
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(whole(mine).detach(), theirs.detach(), rtol=0, atol=1e-8)
        torch.distributed.destroy_process_group()

    as_ranks(work, ranks=ranks)


def test_a_norm_of_whole_tensors_is_that_of_torch():
    weights = [
        torch.nn.Parameter(torch.zeros(3)),
        torch.nn.Parameter(torch.zeros(2, 2)),
        torch.nn.Parameter(torch.ones(1)),
    ]
    weights[0].grad, weights[1].grad = torch.full((3,), 2.0), torch.ones(2, 2)
    assert clip_grad_norm_(weights, 1.0) == pytest.approx(4.0)
    torch.testing.assert_close(weights[0].grad, torch.full((3,), 0.5))
    assert clip_grad_norm_(weights, 5.0) == pytest.approx(1.0)
    torch.testing.assert_close(weights[1].grad, torch.full((2, 2), 0.25))
    weights[0].grad = torch.tensor([torch.inf, 1.0, 1.0])
    assert clip_grad_norm_(weights, torch.inf) == torch.inf
    assert weights[0].grad.tolist() == [torch.inf, 1.0, 1.0]  # nothing is scaled where nothing is clipped
    assert clip_grad_norm_([torch.nn.Parameter(torch.ones(2))], 1.0) == 0.0  # without any gradient


def test_whole_gradients_beside_sharded_ones_count_once():
    def work(_: int) -> None:
        torch.distributed.init_process_group("gloo")
        sharded, plain = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
        fully_shard(sharded, mesh=mesh_of("full", "cpu"))
        (sharded(torch.ones(1, 4)) + plain(torch.ones(1, 4))).sum().backward()
        norm = clip_grad_norm_([*sharded.parameters(), *plain.parameters()], 1.0)
        assert norm.item() == pytest.approx(32**0.5)
        for weight in (sharded.weight, plain.weight):
            torch.testing.assert_close(whole(weight.grad), torch.full((4, 4), 32**-0.5), rtol=1e-5, atol=1e-6)
        torch.distributed.destroy_process_group()

    as_ranks(work, ranks=2)


def test_plain_tensors_stay_as_they_are():
    tensor = torch.ones(3)
    assert whole(tensor) is tensor
    assert placed_like(tensor, torch.zeros(3)) is tensor
    reshard(torch.nn.Linear(2, 2))
