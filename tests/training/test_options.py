"""Every option of a recipe changes something; none is there for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from depthroute.data import load_tokenizer
from depthroute.residual.mhar import Mhar
from depthroute.training import Recipe, train
from depthroute.training.hf_trainer import training_arguments
from depthroute.training.model_building import build_model
from depthroute.training.recipe import Section
from support.small_runs import assert_close, exact, metrics, small_recipe, write_corpus

SHORT = ("training.steps=6", "training.evaluate_every=6")

OF_THE_LOSSES = {
    "seed": "1",
    "model.decoder": "{hidden_act: gelu}",
    "residual": "{scheme: additive}",
    "data.train": "OTHER",
    "data.validation": "OTHER",
    "data.held_out_fraction": "0.3",
    "data.text_field": "title",
    "data.tokenizer": "TOKENIZER",
    "data.sequence_length": "32",
    "data.max_tokens": "2000",
    "data.max_validation_tokens": "300",
    "optimizer.learning_rate": "2e-3",
    "optimizer.beta1": "0.8",
    "optimizer.beta2": "0.9",
    "optimizer.eps": "1e-3",
    "optimizer.weight_decay": "0.5",
    "optimizer.decay": "matrices",
    "optimizer.max_grad_norm": "0.1",
    "optimizer.warmup_steps": "1",
    "optimizer.schedule": "linear",
    "optimizer.min_lr_ratio": "0.5",
    "optimizer.residual_weight_decay": "0.5",
    "optimizer.residual_lr_multiplier": "3.0",
    "optimizer.z_loss": "0.1",
    "training.steps": "4",
    "training.batch_size": "4",
    "training.precision": "bf16",
}
TESTED_BY_NAME = {
    "model.preset",
    "training.evaluate_every",
    "training.log_every",
    "training.tail",
    "training.num_threads",
    "training.compile",
    "training.report_to",
    "training.gradient_checkpointing",
}
TESTED_ELSEWHERE = {
    "name": "test_train.py: the summary",
    "model.checkpoint": "test_mid_training.py: another start",
    "training.ema_decay": "test_ema.py",
    "training.evaluate_first": "test_mid_training.py: the first evaluation",
    "data.subset": "tests/data: hub data sets",
    "training.cuda_graphs": "test_cuda_graphs.py",
    "training.micro_batch_size": "test_train.py: accumulation",
    "training.save_every": "test_resume.py: what is kept",
    "training.sharding": "test_distributed_runs.py: shards through Trainer, and hybrid shard",
    "training.gather_precision": "test_distributed_runs.py: what travels",
    "training.reshard_after_forward": "test_distributed_runs.py: what stays",
}


def options(of: type[Section] = Recipe, path: str = "") -> set[str]:
    found = set()
    for key, field in of.model_fields.items():
        kind = field.annotation
        is_section = isinstance(kind, type) and issubclass(kind, Section)
        found |= options(kind, f"{path}{key}.") if is_section else {f"{path}{key}"}
    return found


@pytest.fixture(scope="module")
def short(corpus, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("short")
    train(small_recipe(corpus, *SHORT), out)
    return out


@pytest.fixture(scope="module")
def names(tmp_path_factory) -> dict[str, str]:
    """Stand-ins for files: another corpus, another tokenizer."""
    folder = tmp_path_factory.mktemp("others")
    tokenizer = load_tokenizer("embedded")
    tokenizer.add_tokens(["river"])
    tokenizer.save_pretrained(folder / "tokenizer")
    return {"OTHER": str(write_corpus(folder, seed=1)), "TOKENIZER": str(folder / "tokenizer")}


def test_every_option_is_tested():
    assert options() == OF_THE_LOSSES.keys() | TESTED_BY_NAME | TESTED_ELSEWHERE.keys()


@pytest.mark.parametrize("option", OF_THE_LOSSES)
def test_it_changes_the_losses(short, corpus, names, tmp_path, option):
    value = OF_THE_LOSSES[option]
    train(small_recipe(corpus, *SHORT, f"{option}={names.get(value, value)}"), tmp_path)
    assert exact(tmp_path) != exact(short)


def test_the_preset_shapes_the_model(corpus):
    recipe = small_recipe(corpus)
    bare = recipe.model_copy(update={"model": recipe.model.model_copy(update={"decoder": {}})})
    assert build_model(bare, load_tokenizer("embedded")).config.hidden_size == 128


def test_logs_and_evaluations_come_as_often_as_asked(corpus, tmp_path):
    recipe = small_recipe(corpus, "training.evaluate_every=5", "training.log_every=3", "training.tail=3")
    summary = train(recipe, tmp_path)
    assert metrics(tmp_path, "evaluation", "step") == [(5,), (10,), (12,)]
    # The first step, every third one, and every one that is saved.
    assert metrics(tmp_path, "train", "step") == [(1,), (3,), (5,), (6,), (9,), (10,), (12,)]
    assert summary["tail_evaluations"] == 3


@pytest.mark.compat
def test_gradient_checkpointing_runs_layers_again_and_changes_no_bit(short, corpus, tmp_path, monkeypatch):
    calls = []
    write = Mhar.write

    def counted(scheme, *arguments):
        calls.append(scheme.training)
        return write(scheme, *arguments)

    monkeypatch.setattr(Mhar, "write", counted)
    train(small_recipe(corpus, *SHORT, "training.gradient_checkpointing=true"), tmp_path)
    assert sum(calls) > 6 * 4  # steps, sublayers
    assert exact(tmp_path) == exact(short)


def test_threads_are_set(corpus, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    train(small_recipe(corpus, *SHORT, "training.num_threads=3"), tmp_path)
    assert asked == [3]


@pytest.mark.compat
def test_a_compiled_run_saves_the_names_of_the_plain_model(short, corpus, tmp_path, monkeypatch):
    def without_code_generation(*args):
        arguments = training_arguments(*args)
        assert arguments.torch_compile
        arguments.torch_compile_backend = "eager"
        return arguments

    monkeypatch.setattr("depthroute.training.trainer.training_arguments", without_code_generation)
    train(small_recipe(corpus, *SHORT, "training.compile=true", "training.save_every=6"), tmp_path)
    plain = load_file(short / "final" / "model.safetensors")
    for folder in ("final", "checkpoint-6"):
        assert load_file(tmp_path / folder / "model.safetensors").keys() == plain.keys()
    assert_close(tmp_path, short, tolerance=1e-6)


def test_a_run_that_does_not_compile_is_not_compiled(corpus, tmp_path):
    assert not training_arguments(small_recipe(corpus), tmp_path).torch_compile


def test_reports_go_where_the_recipe_says(corpus, tmp_path):
    assert training_arguments(small_recipe(corpus, "training.report_to=[wandb]"), tmp_path).report_to == ["wandb"]
    assert training_arguments(small_recipe(corpus), tmp_path).report_to == []
