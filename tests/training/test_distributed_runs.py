"""Whole runs on two processes are those of one: DDP and FSDP2 through Trainer."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

from depthroute.training import hf_trainer, train, trainer
from depthroute.training.checkpoints import SHARDS
from support.models import fsdp_units
from support.small_runs import as_ranks, assert_close, kill_self, metrics, small_recipe


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
    assert fsdp_units(trainer.model) == 3
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
