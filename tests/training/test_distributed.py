"""Two processes compute what one computes: DDP and FSDP2, in a plain loop."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from depthroute.training import load_recipe
from depthroute.training.checkpoints import load_shards, save_shards
from depthroute.training.optim import build_optimizer, clean_name
from depthroute.training.sharding import mesh_of, on_first_rank, shard_from_first, whole
from support.models import fsdp_units, move_off_init, routed
from support.small_runs import as_ranks

STEPS, HALF, BATCH = 20, 10, 4
WORDS = 8  # of the vocabulary of 32: that the others never come is what there is to learn
SCHEMES = {
    "additive": {"scheme": "additive"},
    "mhar": {"scheme": "mhar"},
    "mhar, read scale sum": {"scheme": "mhar", "read_scale": "sum"},
    "block_mhar": {"scheme": "block_mhar", "block_layers": 1},
    "delta_mhar": {"scheme": "delta_mhar", "block_layers": 1},
    "hyper_connections": {"scheme": "hyper_connections"},
}
# What FSDP2 gathers at once: the attention and MLP of a layer, or all of it.
UNITS = {"mhar": "sublayers", "delta_mhar": "layer"}
TINY = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "num_hidden_layers": 2}
OPTIMIZER = load_recipe({"name": "loop", "optimizer": {"learning_rate": 3e-3}}).optimizer


def fresh(scheme: str) -> Any:
    """A model off its initial values, so that gates, queries and null sources all have gradients."""
    return move_off_init(routed(SCHEMES[scheme], **TINY)).train()


def batches() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        yield torch.randint(WORDS, (BATCH, 9), generator=generator)


class Loop:
    """A plain loop over this rank's part of each batch."""

    def __init__(self, model: Any, ranks: int = 1, rank: int = 0) -> None:
        self.model, self.ranks, self.rank = model, ranks, rank
        self.optimizer = build_optimizer(model, OPTIMIZER)
        self.gradients: dict[str, Tensor] = {}

    def run(self, first: int = 0, last: int = STEPS) -> list[float]:
        """The losses of some steps, over the whole batch; the gradients of the first one are kept."""
        losses = []
        for ids in list(batches())[first:last]:
            own = ids.chunk(self.ranks)[self.rank]
            loss = self.model(input_ids=own, labels=own, use_cache=False).loss
            loss.backward()
            self.gradients = self.gradients or {
                clean_name(name): whole(parameter.grad).clone() for name, parameter in self.model.named_parameters()
            }
            self.optimizer.step()
            self.optimizer.zero_grad()
            mean = loss.detach() / self.ranks
            if self.ranks > 1:
                dist.all_reduce(mean)
            losses.append(mean.item())
        return losses


def sharded(scheme: str, kind: str = "full", **options: Any) -> Any:
    """The model of the first rank in shards; the other rank starts on the meta device."""
    model = on_first_rank(lambda: fresh(scheme)).train()
    shard_from_first(model, torch.device("cpu"), mesh_of(kind, "cpu"), **options)
    assert fsdp_units(model) == len(model.model.layers) + 1
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return model


def seen_in_a_step(scheme: str, **options: Any) -> dict[str, Any]:
    """What a layer and its MLP see in a step under options of `shard`, what is left of their weights behind the
    forward, and the gradients."""
    model = sharded(scheme, **options)
    layer, seen = model.model.layers[0], {}

    def look(_: Any, inputs: Any) -> None:
        seen["stream"] = inputs[0].dtype
        seen["queries"] = {p.dtype for name, p in model.model.residual.named_parameters() if "query" in name}

    def look_inside(*_: Any) -> None:
        weights = {"attention": layer.self_attn.q_proj, "mlp": layer.mlp.up_proj, "norm": layer.input_layernorm}
        seen["weights"] = {name: module.weight.dtype for name, module in weights.items()}

    layer.register_forward_pre_hook(look)  # after FSDP2's own
    layer.mlp.register_forward_pre_hook(look_inside)
    ids = next(batches())
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    seen["gathered"] = [not isinstance(part.weight, DTensor) for part in (layer.self_attn.q_proj, layer.mlp.up_proj)]
    loss.backward()
    seen["loss"] = loss.item()
    seen["gradients"] = {clean_name(name): whole(p.grad) for name, p in model.named_parameters()}
    return seen


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What two gloo processes find for every scheme, and the folder of their checkpoints after half of the steps."""
    folder = tmp_path_factory.mktemp("pair")

    def work(rank: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        found: dict[str, Any] = {}
        for scheme in SCHEMES:
            ddp = Loop(DistributedDataParallel(fresh(scheme)), 2, rank)
            ddp_losses = ddp.run()
            fsdp = Loop(sharded(scheme), 2, rank)
            losses = fsdp.run(0, HALF)
            save_shards(folder / scheme, fsdp.model, fsdp.optimizer)
            losses += fsdp.run(HALF)
            again = Loop(sharded(scheme), 2, rank)
            load_shards(folder / scheme, again.model, again.optimizer)
            found[scheme] = {
                "ddp": (ddp_losses, ddp.gradients),
                "fsdp2": (losses, fsdp.gradients),
                "resumed": again.run(HALF),
            }
        found["kept"] = {}
        for scheme in UNITS:
            loop = Loop(sharded(scheme, reshard=False), 2, rank)
            found["kept"][scheme] = (loop.run(0, 3), loop.gradients)
        found["bf16, autocast"] = {scheme: seen_in_a_step(scheme, gather=torch.bfloat16) for scheme in UNITS}
        found["kept, autocast"] = {scheme: seen_in_a_step(scheme, reshard=False) for scheme in UNITS}
        torch.save(found, folder / f"{rank}.pt")
        dist.destroy_process_group()

    as_ranks(work)
    both = [torch.load(folder / f"{rank}.pt") for rank in range(2)]
    assert [both[0][scheme]["resumed"] for scheme in SCHEMES] == [both[1][scheme]["resumed"] for scheme in SCHEMES]
    return both[0], folder


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple[list[float], dict[str, Tensor]]]:
    """What one process finds for every scheme."""
    loops = {scheme: Loop(fresh(scheme)) for scheme in SCHEMES}
    return {scheme: (loop.run(), loop.gradients) for scheme, loop in loops.items()}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_losses_are_those_of_one_process(pair, alone, scheme, strategy):
    losses, expected = pair[0][scheme][strategy][0], alone[scheme][0]
    assert len(losses) == STEPS
    assert losses == pytest.approx(expected, abs=1e-6, rel=0)
    assert expected[-1] < expected[0] - 0.1


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_every_gradient_is_that_of_one_process(pair, alone, scheme, strategy):
    gradients, expected = pair[0][scheme][strategy][1], alone[scheme][1]
    assert gradients.keys() == expected.keys()
    residual = [name for name in expected if name.startswith("model.residual.")]
    assert bool(residual) == (scheme != "additive")
    for name, gradient in expected.items():
        assert gradient.abs().max() > 1e-6, f"{name} has no gradient to compare"
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_checkpoint_of_two_goes_on_with_two_and_with_one(pair, alone, scheme):
    found, folder = pair
    expected = alone[scheme][0][HALF:]
    assert found[scheme]["resumed"] == found[scheme]["fsdp2"][0][HALF:]
    loop = Loop(routed(SCHEMES[scheme], seed=1, **TINY).train())
    load_shards(folder / scheme, loop.model, loop.optimizer)
    assert loop.run(HALF) == pytest.approx(expected, abs=1e-6, rel=0)


def test_hybrid_shard_computes_what_one_process_does(alone, tmp_path):
    def work(rank: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        os.environ["LOCAL_WORLD_SIZE"] = "2"  # as on two hosts
        loop = Loop(sharded("mhar", "hybrid"), 4, rank)
        assert next(loop.model.parameters()).device_mesh.shape == (2, 2)
        torch.save((loop.run(), loop.gradients), tmp_path / f"{rank}.pt")
        dist.destroy_process_group()

    as_ranks(work, ranks=4)
    for rank in range(4):
        losses, gradients = torch.load(tmp_path / f"{rank}.pt")
        assert losses == pytest.approx(alone["mhar"][0], abs=1e-6, rel=0)
        for name, gradient in alone["mhar"][1].items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("scheme", UNITS)
def test_weights_of_layers_travel_as_asked_and_nothing_else_is_rounded(pair, scheme):
    rounded, kept = pair[0]["bf16, autocast"][scheme], pair[0]["kept, autocast"][scheme]
    assert set(kept["weights"].values()) == {torch.float32}
    norm = torch.float32 if UNITS[scheme] == "sublayers" else torch.bfloat16  # of the rest of the model, or of the unit
    assert rounded["weights"] == {"attention": torch.bfloat16, "mlp": torch.bfloat16, "norm": norm}
    stream = torch.bfloat16 if scheme == "mhar" else torch.float32  # sources are in autocast's dtype, a stream is not
    assert rounded["stream"] == kept["stream"] == stream
    assert rounded["queries"] == kept["queries"] == {torch.float32}
    assert rounded["loss"] == pytest.approx(kept["loss"], rel=1e-3)


@pytest.mark.parametrize("scheme", UNITS)
def test_gradients_of_weights_that_travel_rounded_are_reduced_in_fp32(pair, scheme):
    rounded, kept = (pair[0][how][scheme]["gradients"] for how in ("bf16, autocast", "kept, autocast"))
    assert {gradient.dtype for gradient in rounded.values()} == {torch.float32}
    for name, gradient in kept.items():
        assert (rounded[name] - gradient).norm() < 0.1 * gradient.norm(), name  # all but what bf16 rounds


@pytest.mark.parametrize("scheme", UNITS)
def test_a_gathered_layer_stays_where_asked(pair, scheme):
    assert pair[0]["bf16, autocast"][scheme]["gathered"] == [False, False]
    assert pair[0]["kept, autocast"][scheme]["gathered"] == [True, True]


@pytest.mark.parametrize("scheme", UNITS)
def test_layers_that_stay_gathered_compute_what_one_process_does(pair, alone, scheme):
    losses, gradients = pair[0]["kept"][scheme]
    assert losses == pytest.approx(alone[scheme][0][:3], abs=1e-6, rel=0)  # each after another update
    for name, gradient in alone[scheme][1].items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-7)
