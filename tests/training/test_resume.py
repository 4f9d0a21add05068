"""Runs that are killed, at any moment, and go on as if nothing had happened."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from depthroute.training import checkpoints, hf_trainer, train, trainer
from depthroute.training.checkpoints import MANIFEST
from support.small_runs import STEPS, as_ranks, end_of, exact, kill_self, metrics, same_weights, small_recipe, start

# Dropout, so that the state of the random numbers matters; checkpoints in the middle of a mean over logged steps.
OVERRIDES = (
    "model.decoder.attention_dropout=0.2",
    "training.micro_batch_size=4",
    "training.log_every=5",
    "training.save_every=3",
)


@pytest.fixture(scope="module")
def recipe(corpus):
    return small_recipe(corpus, *OVERRIDES)


@pytest.fixture(scope="module")
def uninterrupted(recipe, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("uninterrupted")
    train(recipe, out)
    return out


def assert_equal(out: Path, other: Path) -> None:
    assert exact(out) == exact(other)
    assert same_weights(out, other)
    assert {path.name for path in out.iterdir()} == {path.name for path in other.iterdir()}
    summaries = [json.loads((folder / "summary.json").read_text(encoding="utf-8")) for folder in (out, other)]
    assert summaries[0]["tail_loss"] == summaries[1]["tail_loss"]


def slowly(recipe, out: Path, seconds: float = 0.03) -> None:
    """Train, with a pause in each step."""
    step = hf_trainer.RecipeTrainer.training_step

    def paused(*args, **kwargs):
        time.sleep(seconds)
        return step(*args, **kwargs)

    hf_trainer.RecipeTrainer.training_step = paused
    train(recipe, out)


def killed_with(recipe, out: Path, prepare_the_kill) -> None:
    """Train in another process, where `prepare_the_kill` has put `kill_self` somewhere."""

    def work() -> None:
        prepare_the_kill()
        train(recipe, out)

    assert end_of(start(work)) == -signal.SIGKILL


def last_step(out: Path) -> int:
    path = out / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return json.loads(lines[-1])["step"] if lines else 0


@pytest.mark.compat
@pytest.mark.parametrize("step", [1, 5, 9])
def test_a_run_killed_after_any_step_goes_on_bit_for_bit(recipe, uninterrupted, tmp_path, step, capsys):
    child = start(lambda: slowly(recipe, tmp_path))
    while last_step(tmp_path) < step:
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    assert end_of(child) == -signal.SIGKILL
    assert not (tmp_path / "summary.json").exists()
    checkpoint = checkpoints.last_complete(tmp_path)
    train(recipe, tmp_path)
    assert_equal(tmp_path, uninterrupted)
    said = capsys.readouterr().err
    if checkpoint is None:
        assert "goes on" not in said
    else:
        assert f"goes on after step {checkpoints.step_of(checkpoint)}/{recipe.training.steps}" in said


def cut_off_at_the_optimizer() -> None:
    whole = torch.save

    def cut_off(state, path, *args, **kwargs):
        whole(state, path, *args, **kwargs)
        if "checkpoint-6" in str(path) and "optimizer" in str(path):
            os.truncate(path, os.path.getsize(path) // 2)
            kill_self()

    torch.save = cut_off


def cut_off_before_the_manifest() -> None:
    hf_trainer.seal = lambda folder: kill_self() if folder.name == "checkpoint-6" else checkpoints.seal(folder)


@pytest.mark.parametrize("cut_off", [cut_off_at_the_optimizer, cut_off_before_the_manifest])
def test_a_checkpoint_cut_off_by_a_kill_is_named_and_not_loaded(recipe, uninterrupted, tmp_path, caplog, cut_off):
    killed_with(recipe, tmp_path, cut_off)
    assert not (tmp_path / "checkpoint-6" / MANIFEST).exists()
    assert (tmp_path / "checkpoint-3" / MANIFEST).exists()
    with caplog.at_level(logging.WARNING):
        train(recipe, tmp_path)
    assert "checkpoint-6 is not loaded: it has no manifest.json" in caplog.text
    assert_equal(tmp_path, uninterrupted)


def test_a_checkpoint_damaged_later_is_named_and_the_one_before_is_loaded(
    recipe, uninterrupted, tmp_path, caplog, monkeypatch
):
    def kill_at_the_end() -> None:
        trainer.RecipeTrainer.save_final = lambda *_: kill_self()

    killed_with(recipe, tmp_path, kill_at_the_end)
    os.truncate(tmp_path / "checkpoint-12" / "model.safetensors", 100)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        train(recipe, tmp_path)
    assert "checkpoint-12 is not loaded: model.safetensors has 100 bytes" in caplog.text
    assert "missing keys" not in caplog.text  # the head is the embedding and so not saved twice
    assert_equal(tmp_path, uninterrupted)


def kill_at_the_final_model() -> None:
    trainer.RecipeTrainer.save_final = lambda *_: kill_self()


def kill_within_the_final_model() -> None:
    Path.rename = lambda *_: kill_self()


def kill_at_the_summary() -> None:
    whole = trainer.write_json
    trainer.write_json = lambda path, values: kill_self() if path.name == "summary.json" else whole(path, values)


@pytest.mark.parametrize("kill", [kill_at_the_final_model, kill_within_the_final_model, kill_at_the_summary])
def test_a_run_killed_after_its_last_step_is_finished_without_training(
    recipe, uninterrupted, tmp_path, monkeypatch, kill
):
    killed_with(recipe, tmp_path, kill)
    monkeypatch.setattr(hf_trainer.RecipeTrainer, "training_step", lambda *_, **__: pytest.fail("it trained again"))
    train(recipe, tmp_path)
    assert_equal(tmp_path, uninterrupted)


def test_lines_after_the_checkpoint_and_lines_cut_off_are_taken_back(recipe, uninterrupted, tmp_path):
    killed_with(recipe, tmp_path, cut_off_before_the_manifest)
    assert last_step(tmp_path) == 6
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"kind": "train", "step": 7, "lo')
    train(recipe, tmp_path)
    assert_equal(tmp_path, uninterrupted)


def test_a_checkpoint_is_a_model_that_generates_with_a_cache(uninterrupted):
    assert AutoConfig.from_pretrained(uninterrupted / "checkpoint-12").use_cache


def test_the_last_two_checkpoints_stay_where_they_were_asked_for(uninterrupted):
    assert {path.name for path in uninterrupted.glob("checkpoint-*")} == {"checkpoint-9", "checkpoint-12"}


def test_checkpoints_come_with_evaluations_and_go_at_the_end_where_they_were_not(corpus, finished, tmp_path):
    killed_with(small_recipe(corpus), tmp_path, kill_at_the_summary)
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-8", "checkpoint-12"}
    train(small_recipe(corpus), tmp_path)
    assert_equal(tmp_path, finished)


def test_a_kill_right_after_the_summary_leaves_no_checkpoints_for_ever(corpus, finished, tmp_path):
    def kill_at_the_cleaning() -> None:
        trainer.rotate = lambda *_, **__: kill_self()

    killed_with(small_recipe(corpus), tmp_path, kill_at_the_cleaning)
    assert list(tmp_path.glob("checkpoint-*"))
    train(small_recipe(corpus), tmp_path)
    assert_equal(tmp_path, finished)


@pytest.mark.compat
def test_two_ranks_that_were_killed_go_on_bit_for_bit(corpus, tmp_path):
    recipe = small_recipe(corpus, "model.decoder.attention_dropout=0.2")
    whole, halted = tmp_path / "whole", tmp_path / "halted"
    as_ranks(lambda _: train(recipe, whole))

    def halt(_: int) -> None:
        # After the sixth step, on every rank.
        step = hf_trainer.RecipeTrainer.training_step

        def kill_late(self, *args, **kwargs):
            return kill_self() if self.state.global_step == 6 else step(self, *args, **kwargs)

        hf_trainer.RecipeTrainer.training_step = kill_late
        train(recipe, halted)

    as_ranks(halt, ends=-signal.SIGKILL)
    assert last_step(halted) == 6
    as_ranks(lambda _: train(recipe, halted))
    assert_equal(halted, whole)
    assert len(metrics(halted, "train", "step")) == STEPS
