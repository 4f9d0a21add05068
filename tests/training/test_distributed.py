"""Two processes compute what one computes: DDP and FSDP2, in a plain loop and through Trainer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from depthroute.training import hf_trainer, load_recipe, train, trainer
from depthroute.training.checkpoints import SHARDS, load_shards, save_shards
from depthroute.training.optim import build_optimizer, clean_name
from depthroute.training.sharding import mesh_of, on_first_rank, shard_from_first, whole
from support.models import move_off_init, routed
from support.small_runs import as_ranks, assert_close, kill_self, metrics, small_recipe

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


def units(model: torch.nn.Module) -> int:
    """How many units FSDP2 gathers; some are several modules."""
    return len({id(module._get_fsdp_state()) for module in model.modules() if isinstance(module, FSDPModule)})


def sharded(scheme: str, kind: str = "full", **options: Any) -> Any:
    """The model of the first rank in shards; the other rank starts on the meta device."""
    model = on_first_rank(lambda: fresh(scheme)).train()
    shard_from_first(model, torch.device("cpu"), mesh_of(kind, "cpu"), **options)
    assert units(model) == len(model.model.layers) + 1
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


@pytest.mark.compat
@pytest.mark.parametrize("micro_batch_size", ["null", "2"])
def test_training_by_ddp_is_that_of_one_process(finished, corpus, tmp_path, micro_batch_size):
    recipe = small_recipe(corpus, f"training.micro_batch_size={micro_batch_size}")
    as_ranks(lambda _: train(recipe, tmp_path))
    # Rounding: the losses are near 7.6, whose last place is 4.8e-7.
    assert_close(tmp_path, finished, tolerance=2e-6)
    summary, one = (json.loads((out / "summary.json").read_text(encoding="utf-8")) for out in (tmp_path, finished))
    assert summary["parameters"] == one["parameters"]
    assert json.loads((tmp_path / "environment.json").read_text(encoding="utf-8"))["processes"] == 2
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in finished.iterdir()}
    for speed, memory, devices in metrics(tmp_path, "train", "tokens_per_second", "peak_memory_bytes", "devices"):
        assert len(devices) == 2
        assert memory == max(device["peak_memory_bytes"] for device in devices)
        assert sum(device["tokens_per_second"] for device in devices) == pytest.approx(speed, rel=0.5)


@pytest.mark.parametrize("sharding", ["none", "full"])
def test_a_checkpoint_between_two_log_lines_is_one_for_every_rank(corpus, tmp_path, sharding):
    recipe = small_recipe(corpus, "training.log_every=5", f"training.sharding={sharding}")
    as_ranks(lambda _: train(recipe, tmp_path / "two"))
    train(small_recipe(corpus, "training.log_every=5"), tmp_path / "one")
    assert {(4,), (8,), (12,)} <= set(metrics(tmp_path / "two", "train", "step"))
    assert_close(tmp_path / "two", tmp_path / "one", tolerance=2e-6)


def shards_are_there(trainer: Any) -> None:
    """Accelerate runs DDP on the CPU, whatever it was asked for, unless we see to it."""
    assert trainer.accelerator.is_fsdp2
    assert units(trainer.model) == 3
    assert not any(isinstance(module, DistributedDataParallel) for module in trainer.model_wrapped.modules())


@pytest.mark.compat
def test_training_by_fsdp2_is_that_of_one_process(finished, corpus, tmp_path):
    def work(_: int) -> None:
        step = hf_trainer.RecipeTrainer.training_step

        def looked_at(self: Any, *args: Any, **kwargs: Any) -> Any:
            shards_are_there(self)
            return step(self, *args, **kwargs)

        hf_trainer.RecipeTrainer.training_step = looked_at
        train(small_recipe(corpus, "training.sharding=full"), tmp_path)

    as_ranks(work)
    assert_close(tmp_path, finished, tolerance=2e-6)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in finished.iterdir()}
    left, right = (AutoModelForCausalLM.from_pretrained(out / "final").state_dict() for out in (tmp_path, finished))
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=0, atol=1e-5)
    # A tied head is the embedding, and is in no file.
    files = [load_file(out / "final" / "model.safetensors") for out in (tmp_path, finished)]
    assert files[0].keys() == files[1].keys()
    assert "lm_head.weight" not in files[0]


@pytest.mark.slow
def test_torchrun_starts_a_sharded_run(finished, tmp_path):
    """The command of docs/scale.md."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = ["-m", "depthroute.cli", "train", str(finished / "recipe.yaml"), "training.sharding=full"]
    subprocess.run([*start, *command, "--out", str(tmp_path)], check=True, capture_output=True, timeout=300)
    assert json.loads((tmp_path / "environment.json").read_text(encoding="utf-8"))["processes"] == 2
    assert_close(tmp_path, finished, tolerance=2e-6)


def test_what_a_sharded_run_leaves_is_mid_trained_in_shards_and_whole(corpus, tmp_path):
    as_ranks(lambda _: train(small_recipe(corpus, "training.sharding=full", "training.steps=4"), tmp_path / "first"))
    recipe = small_recipe(corpus, "training.sharding=full", checkpoint=tmp_path / "first" / "final")
    for ranks in (1, 2):
        as_ranks(lambda _, ranks=ranks: train(recipe, tmp_path / f"{ranks}"), ranks=ranks)
    assert_close(tmp_path / "2", tmp_path / "1", tolerance=2e-6)


def test_between_microbatches_gradients_are_shards_too(finished, corpus, tmp_path):
    def work(_: int) -> None:
        step = hf_trainer.RecipeTrainer.training_step

        def looked_at(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            loss = step(self, model, *args, **kwargs)
            assert isinstance(self.model.get_input_embeddings().weight.grad, DTensor)  # not kept whole, for later
            return loss

        hf_trainer.RecipeTrainer.training_step = looked_at
        train(small_recipe(corpus, "training.sharding=full", "training.micro_batch_size=1"), tmp_path)

    as_ranks(work)
    assert_close(tmp_path, finished, tolerance=2e-6)


def test_a_sharded_run_that_does_not_clip_logs_the_norm_all_the_same(corpus, tmp_path):
    overrides = ("optimizer.max_grad_norm=0", "training.steps=4", "training.log_every=1")
    train(small_recipe(corpus, *overrides), tmp_path / "one")
    as_ranks(lambda _: train(small_recipe(corpus, *overrides, "training.sharding=full"), tmp_path / "two"))
    one, two = ([norm for (norm,) in metrics(tmp_path / run, "train", "grad_norm")] for run in ("one", "two"))
    assert len(one) == 4
    assert two == pytest.approx(one, rel=1e-4)


def test_the_recipe_says_what_travels_and_what_stays(corpus, tmp_path):
    asked = ("training.sharding=hybrid", "training.gather_precision=bf16", "training.reshard_after_forward=false")

    def work(rank: int) -> None:
        shard_model = hf_trainer.shard_from_first

        def told(model: Any, device: Any, mesh: Any, **options: Any) -> None:
            options = {key: str(value) for key, value in options.items()}
            (tmp_path / f"{rank}.json").write_text(json.dumps({"mesh": mesh.shape, **options}), encoding="utf-8")
            shard_model(model, device, mesh)

        hf_trainer.shard_from_first = told
        train(small_recipe(corpus, *asked, "training.precision=bf16", "training.steps=4"), tmp_path / "run")

    as_ranks(work)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))
        assert found == {"mesh": [1, 2], "gather": "torch.bfloat16", "reshard": "False"}


@pytest.mark.compat
@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 2), (1, 2)])
def test_a_killed_run_goes_on_with_another_number_of_processes(corpus, tmp_path, before, after):
    overrides = ("training.sharding=full", "training.ema_decay=0.9", "training.gradient_checkpointing=true")
    recipe = small_recipe(corpus, *overrides)

    def halt(_: int) -> None:
        step = hf_trainer.RecipeTrainer.training_step

        def kill_late(self: Any, *args: Any, **kwargs: Any) -> Any:
            return kill_self() if self.state.global_step == 6 else step(self, *args, **kwargs)

        hf_trainer.RecipeTrainer.training_step = kill_late
        train(recipe, tmp_path)

    as_ranks(halt, ranks=before, ends=-signal.SIGKILL)
    assert (tmp_path / "checkpoint-4" / SHARDS).is_dir()
    as_ranks(lambda _: train(recipe, tmp_path), ranks=after)
    whole_run = tmp_path / "whole"
    train(recipe, whole_run)
    assert_close(tmp_path, whole_run, tolerance=2e-6)
    found, expected = (metrics(out, "evaluation", "ema_loss") for out in (tmp_path, whole_run))
    assert found == [pytest.approx(pair, abs=2e-6) for pair in expected]


@pytest.mark.slow
def test_a_model_compiled_whole_under_ddp_trains_as_one_process_does(corpus, tmp_path):
    recipe = small_recipe(corpus, "residual={scheme: mhar}", "training.compile=true")
    train(small_recipe(corpus, "residual={scheme: mhar}"), tmp_path / "one")

    def work(_: int) -> None:
        arguments = trainer.training_arguments

        def without_inductor(*given: Any) -> Any:  # whose threads would not be there in a forked process
            found = arguments(*given)
            found.torch_compile_backend = "aot_eager"
            return found

        trainer.training_arguments = without_inductor
        train(recipe, tmp_path / "two")
        counters = torch._dynamo.utils.counters
        assert counters["stats"]["unique_graphs"] == 1, counters
        assert not counters["inductor"]

    as_ranks(work)
    assert_close(tmp_path / "two", tmp_path / "one", tolerance=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["mhar", "delta_mhar, block_layers: 1"])
def test_compiled_parts_on_two_processes_are_those_of_one(corpus, tmp_path, scheme):
    overrides = ("training.gradient_checkpointing=true", f"residual={{scheme: {scheme}}}")
    recipe = small_recipe(corpus, *overrides, "training.sharding=full", "training.compile=true")
    one = tmp_path / "one"
    train(small_recipe(corpus, *overrides), one)

    def work(_: int) -> None:
        compile_parts = hf_trainer.compile_parts
        hf_trainer.compile_parts = lambda model: compile_parts(model, backend="aot_eager", fullgraph=True)
        train(recipe, tmp_path / "two")
        counted = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        # Two layers, or attention and MLP, in training and in evaluation, where a rank may get another number of
        # sequences; the loss.
        assert counted in (2 * 2 + 1, 3 * 2 + 1), f"{counted} graphs"

    as_ranks(work)
    assert_close(tmp_path / "two", one, tolerance=2e-6)
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "final", output_loading_info=True)
    assert (set(info["missing_keys"]), set(info["unexpected_keys"])) == (set(), set())
