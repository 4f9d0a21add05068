"""Whole runs: what they leave in their folder, and what each option does."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import depthroute
from depthroute.data import prepare
from depthroute.files import alone_in
from depthroute.training import load_recipe, train
from depthroute.training.evaluation import mean_loss
from depthroute.training.optim import rate_ratio
from depthroute.training.recipe import differing_keys, recipe_text
from support.small_runs import STEPS, assert_close, exact, metrics, same_weights, small_recipe, write_corpus


def summary_of(out: Path) -> dict:
    return json.loads((out / "summary.json").read_text(encoding="utf-8"))


def test_a_finished_folder_holds_what_it_should_and_nothing_else(finished):
    names = {path.name for path in finished.iterdir()}
    assert names == {
        "recipe.yaml",
        "environment.json",
        "metrics.jsonl",
        "held_out.jsonl",
        "final",
        "read_weights.json",
        "summary.json",
    }


def test_the_resolved_recipe_is_kept(finished, corpus):
    assert differing_keys(load_recipe(finished / "recipe.yaml"), small_recipe(corpus)) == []


def test_metrics_have_every_step_and_evaluation(finished):
    train_lines = metrics(
        finished, "train", "step", "tokens", "lr", "seconds", "tokens_per_second", "peak_memory_bytes"
    )
    assert [line[:2] for line in train_lines] == [(step, step * 8 * 16) for step in range(1, STEPS + 1)]
    recipe = load_recipe(finished / "recipe.yaml").optimizer
    assert [line[2] for line in train_lines] == [1e-3 * rate_ratio(step, STEPS, recipe) for step in range(STEPS)]
    seconds = [line[3] for line in train_lines]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0
    assert all(line[4] > 0 and line[5] > 0 for line in train_lines)
    evaluations = metrics(finished, "evaluation", "step", "tokens", "num_tokens", "seconds")
    assert [line[:2] for line in evaluations] == [(step, step * 8 * 16) for step in (4, 8, 12)]
    assert {line[2] for line in evaluations} == {500 // 16 * 15}


def test_training_lowers_the_held_out_loss_from_log_of_the_vocabulary(finished):
    first = metrics(finished, "train", "loss")[0][0]
    assert first == pytest.approx(math.log(2048), abs=0.1)
    losses = [loss for (loss,) in metrics(finished, "evaluation", "loss")]
    assert losses == sorted(losses, reverse=True)


def test_the_summary_says_what_the_metrics_say(finished):
    summary = summary_of(finished)
    losses = [loss for (loss,) in metrics(finished, "evaluation", "loss")]
    assert summary["final_loss"] == losses[-1]
    assert summary["tail_loss"] == statistics.fmean(losses[-2:])
    assert summary["tail_evaluations"] == 2
    speeds = [speed for (speed,) in metrics(finished, "train", "tokens_per_second")]
    assert summary["tokens_per_second"] == statistics.median(speeds[1:])
    assert (summary["steps"], summary["tokens"]) == (STEPS, STEPS * 8 * 16)
    assert (summary["name"], summary["seed"], summary["scheme"]) == ("small", 0, "mhar")
    model = AutoModelForCausalLM.from_pretrained(finished / "final")
    assert summary["parameters"] == model.num_parameters()
    assert summary["residual_parameters"] == sum(p.numel() for p in model.model.residual.parameters())
    assert 0 < summary["unigram_entropy"] < math.log(2048)
    assert summary["seconds_to_first_step"] > 0
    assert summary["seconds"] > metrics(finished, "train", "seconds")[-1][0]


@pytest.mark.compat
def test_the_saved_model_has_the_loss_of_the_last_evaluation(finished, corpus):
    model = AutoModelForCausalLM.from_pretrained(finished / "final")
    validation = prepare(small_recipe(corpus).data, finished.parent / "cache").validation
    assert mean_loss(model, validation, 8) == summary_of(finished)["final_loss"]


@pytest.mark.compat
def test_the_saved_model_generates_with_its_tokenizer(finished):
    tokenizer = AutoTokenizer.from_pretrained(finished / "final")
    model = AutoModelForCausalLM.from_pretrained(finished / "final")
    assert model.config.use_cache
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    ids = tokenizer("the old river", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=5, do_sample=False).shape[1] > ids.shape[1]


def test_the_environment_names_versions_and_devices(finished):
    environment = json.loads((finished / "environment.json").read_text(encoding="utf-8"))
    assert environment["depthroute"] == depthroute.__version__
    assert environment["packages"]["torch"] == torch.__version__
    assert environment["devices"]
    assert environment["processes"] == 1
    assert {"commit", "dirty", "python", "command", "threads"} <= environment.keys()


def test_read_weights_are_distributions_over_the_sources(finished):
    sites = json.loads((finished / "read_weights.json").read_text(encoding="utf-8"))
    assert [len(site["sources"]) for site in sites] == [2, 3, 4, 5]
    for site in sites:
        assert all(sum(row) == pytest.approx(1, abs=1e-5) for row in site["weights"])


def test_a_finished_run_returns_its_summary_at_once(finished, corpus, monkeypatch):
    monkeypatch.setattr("depthroute.training.trainer.prepare", lambda *_: pytest.fail("it trained again"))
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    assert train(small_recipe(corpus), finished) == summary_of(finished)
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before


def test_a_folder_with_another_recipe_is_refused_by_the_keys_that_differ(finished, corpus):
    with pytest.raises(ValueError, match=r"another recipe \(seed, optimizer\.beta1\)"):
        train(small_recipe(corpus, "seed=1", "optimizer.beta1=0.8"), finished)


def test_a_folder_in_which_another_process_trains_is_refused_and_left_alone(corpus, tmp_path):
    train(small_recipe(corpus, "training.steps=4"), tmp_path / "run")
    (tmp_path / "run/summary.json").unlink()
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    with alone_in(tmp_path / "run", ""), pytest.raises(RuntimeError, match=r"^out: another process is training in "):
        train(small_recipe(corpus, "training.steps=4"), tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before
    assert train(small_recipe(corpus, "training.steps=4"), tmp_path / "run")["steps"] == 4


def test_a_start_that_failed_does_not_take_the_folder(corpus, tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing"):
        train(small_recipe(corpus, "data.train=nothing.txt"), tmp_path / "run")
    assert train(small_recipe(corpus, "training.steps=4"), tmp_path / "run")["steps"] == 4


def test_a_run_that_was_killed_before_its_first_step_does_not_take_the_folder(corpus, tmp_path):
    (tmp_path / "recipe.yaml").write_text(recipe_text(small_recipe(corpus, "seed=5")), encoding="utf-8")
    train(small_recipe(corpus, "training.steps=4"), tmp_path)


def test_a_run_goes_on_with_the_data_that_it_began_with_or_not_at_all(tmp_path):
    corpus = write_corpus(tmp_path)
    recipe = small_recipe(corpus, "training.steps=4", "training.save_every=2")
    train(recipe, tmp_path / "run")
    (tmp_path / "run/summary.json").unlink()  # as if it had been cut right before its end
    kept = corpus.read_text(encoding="utf-8")
    corpus.write_text(kept + "\n" + json.dumps({"title": "new", "text": "green old river"}), encoding="utf-8")
    with pytest.raises(ValueError, match="data: files or tokenizer have changed since the run in"):
        train(recipe, tmp_path / "run")
    corpus.write_text(kept, encoding="utf-8")
    train(recipe, tmp_path / "run")


def test_a_name_that_looks_like_a_number_stays_a_name(corpus, tmp_path):
    recipe = small_recipe(corpus, "training.steps=4").model_copy(update={"name": "7e8"})
    train(recipe, tmp_path)
    assert train(recipe, tmp_path)["name"] == "7e8"


def test_the_tail_has_no_evaluation_from_before_the_first_step(corpus, tmp_path):
    summary = train(small_recipe(corpus, "training.evaluate_first=true", "training.tail=11"), tmp_path)
    losses = [loss for step, loss in metrics(tmp_path, "evaluation", "step", "loss") if step > 0]
    assert summary["tail_evaluations"] == len(losses) == 3
    assert summary["tail_loss"] == pytest.approx(sum(losses) / 3)


def test_the_precision_is_the_recipes_under_accelerate_too(corpus, tmp_path, monkeypatch):
    recipe = small_recipe(corpus, "training.steps=4")
    train(recipe, tmp_path / "plain")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # as its launcher sets it
    train(recipe, tmp_path / "launched")
    assert exact(tmp_path / "launched") == exact(tmp_path / "plain")


def test_a_run_without_its_recipe_is_refused(tmp_path, corpus):
    (tmp_path / "summary.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"without its recipe\.yaml"):
        train(small_recipe(corpus), tmp_path)


def test_a_final_model_that_transformers_cannot_load_is_an_error(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("depthroute.training.hf_trainer.clean_name", lambda name: f"wrapped.{name}")
    with pytest.raises(ValueError, match="final: its weights lack"):
        train(small_recipe(corpus), tmp_path)
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.compat
def test_two_runs_of_a_recipe_are_equal_bit_for_bit(finished, corpus, tmp_path):
    train(small_recipe(corpus), tmp_path)
    assert exact(tmp_path) == exact(finished)
    assert same_weights(tmp_path, finished)


@pytest.mark.compat
@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_accumulated_batches_give_the_steps_of_one_large_batch(finished, corpus, tmp_path, micro_batch_size):
    train(small_recipe(corpus, f"training.micro_batch_size={micro_batch_size}"), tmp_path)
    assert_close(tmp_path, finished, tolerance=5e-6)
