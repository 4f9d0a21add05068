"""Several processes train as one does: DDP through Trainer, and FSDP2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import set_seed

from depthroute.data import EpochOrder, prepare
from depthroute.training import Recipe, train
from depthroute.training.model_building import build_model
from depthroute.training.optim import build_optimizer
from support.small_runs import as_ranks, assert_close, small_recipe


@pytest.mark.compat
@pytest.mark.parametrize("micro_batch_size", ["null", "2"])
def test_two_ranks_under_ddp_agree_with_one_process(finished, corpus, tmp_path, micro_batch_size):
    recipe = small_recipe(corpus, f"training.micro_batch_size={micro_batch_size}")
    as_ranks(lambda _: train(recipe, tmp_path))
    assert_close(tmp_path, finished, tolerance=1e-6)
    summary, one = (json.loads((out / "summary.json").read_text(encoding="utf-8")) for out in (tmp_path, finished))
    assert summary["parameters"] == one["parameters"]
    assert json.loads((tmp_path / "environment.json").read_text(encoding="utf-8"))["processes"] == 2
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in finished.iterdir()}


def losses(recipe: Recipe, cache: Path, *, shard: bool, steps: int = 5) -> list[float]:
    """The losses of a plain loop over this rank's part of each batch."""
    splits = prepare(recipe.data, cache)
    set_seed(recipe.seed)
    model = build_model(recipe, splits.tokenizer)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if shard else (0, 1)
    if shard:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        assert sum(isinstance(module, FSDPModule) for module in model.modules()) == len(model.model.layers) + 1
    optimizer = build_optimizer(model, recipe.optimizer)
    order = EpochOrder(splits.train, recipe.seed, steps * 8)
    found = []
    for step in range(steps):
        items = [order[8 * step + i] for i in range(rank * 8 // ranks, (rank + 1) * 8 // ranks)]
        ids = torch.stack([item["input_ids"] for item in items])
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / ranks
        if shard:
            dist.all_reduce(mean)
        found.append(mean.item())
    return found


@pytest.mark.parametrize(
    "residual",
    [
        "{scheme: additive}",
        "{scheme: mhar}",
        "{scheme: mhar, read_scale: sum}",
        "{scheme: block_mhar}",
        "{scheme: delta_mhar, block_layers: 1}",
        "{scheme: hyper_connections}",
    ],
)
def test_two_ranks_under_fsdp2_agree_with_one_process(corpus, tmp_path, residual):
    recipe = small_recipe(corpus, f"residual={residual}", "optimizer.learning_rate=1e-2")
    cache = tmp_path / "cache"
    expected = losses(recipe, cache, shard=False)

    def work(rank: int) -> None:
        dist.init_process_group("gloo")
        found = losses(recipe, cache, shard=True)
        (tmp_path / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
        dist.destroy_process_group()

    as_ranks(work)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))
        assert found == pytest.approx(expected, abs=1e-6, rel=0)
    assert expected[-1] < expected[0] - 0.1
