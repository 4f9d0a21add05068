"""Mid-training: arms that start from one checkpoint, equal to it, and differ in nothing but the routing."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from depthroute.data import EpochOrder, load_tokenizer, prepare
from depthroute.studies.study import load_study, runs
from depthroute.training import hf_trainer, load_recipe, train
from depthroute.training.evaluation import mean_loss
from depthroute.training.model_building import build_model
from depthroute.training.readings import read_parameters
from depthroute.training.recipe import differing_keys
from support.models import routed
from support.small_runs import end_of, kill_self, metrics, small_recipe, start, without_times

ARMS = {
    "control": "{scheme: additive}",
    "gated": "{scheme: delta_mhar, block_layers: 1}",
    "sum-scaled": "{scheme: mhar, read_scale: sum}",
}
OVERRIDES = (
    "data.tokenizer=checkpoint",
    "optimizer.weight_decay=0.05",
    "optimizer.decay=projections",
    "optimizer.z_loss=1e-4",
    "optimizer.min_lr_ratio=0.01",
    "training.ema_decay=0.9",
    "training.evaluate_first=true",
)


def mid_training(corpus: Path, checkpoint: Path, arm: str, *overrides: str):
    return small_recipe(corpus, *OVERRIDES, f"residual={ARMS[arm]}", *overrides, checkpoint=checkpoint)


@pytest.fixture(scope="module")
def arms(corpus, checkpoint, tmp_path_factory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("arms")
    for arm in ARMS:
        train(mid_training(corpus, checkpoint, arm), out / arm)
    return {arm: out / arm for arm in ARMS}


def test_all_arms_start_with_the_loss_of_the_checkpoint(arms, corpus, checkpoint):
    recipe = mid_training(corpus, checkpoint, "control")
    validation = prepare(recipe.data_with_tokenizer, next(iter(arms.values())).parent / "cache").validation
    expected = mean_loss(AutoModelForCausalLM.from_pretrained(checkpoint), validation, 8)
    for arm, out in arms.items():
        step, loss, ema_loss = metrics(out, "evaluation", "step", "loss", "ema_loss")[0]
        assert step == 0
        assert loss == ema_loss == pytest.approx(expected, abs=1e-6), arm
    train_losses = [metrics(out, "train", "loss")[0][0] for out in arms.values()]
    assert train_losses == [pytest.approx(train_losses[0], abs=1e-6)] * len(ARMS)


def test_the_gated_arm_starts_as_the_control_bit_for_bit(arms):
    assert (
        metrics(arms["gated"], "evaluation", "loss", "stderr")[0]
        == metrics(arms["control"], "evaluation", "loss", "stderr")[0]
    )


def test_they_part_then_and_all_learn(arms):
    last = {arm: metrics(out, "evaluation", "loss")[-1][0] for arm, out in arms.items()}
    assert len(set(last.values())) == len(ARMS)
    assert all(last[arm] < metrics(out, "evaluation", "loss")[0][0] - 0.01 for arm, out in arms.items())


def test_the_first_evaluation_is_there_only_where_it_was_asked_for(arms, corpus, checkpoint, tmp_path):
    assert metrics(arms["control"], "evaluation", "step") == [(0,), (4,), (8,), (12,)]
    train(mid_training(corpus, checkpoint, "control", "training.evaluate_first=false"), tmp_path)
    assert without_times(tmp_path) == without_times(arms["control"])[1:]


def test_the_order_of_the_data_is_the_same_for_all_arms(corpus, checkpoint, tmp_path):
    orders = []
    for arm in ARMS:
        recipe = mid_training(corpus, checkpoint, arm)
        splits = prepare(recipe.data_with_tokenizer, tmp_path)
        order = EpochOrder(splits.train, recipe.seed, 96)
        orders.append(torch.stack([order[i]["input_ids"] for i in range(96)]))
    assert all(torch.equal(order, orders[0]) for order in orders)


def test_residual_lines_follow_the_gates_and_the_queries(arms, corpus, checkpoint):
    assert not metrics(arms["control"], "residual", "step")
    for arm, steps in (("gated", [0, 4, 8, 12]), ("sum-scaled", [0, 4, 8, 12])):
        lines = metrics(arms[arm], "residual", "step", "tokens", "gates", "query_norms")
        assert [line[:2] for line in lines] == [(step, step * 8 * 16) for step in steps]
        model = AutoModelForCausalLM.from_pretrained(arms[arm] / "final")
        assert read_parameters(model) == {"gates": lines[-1][2], "query_norms": lines[-1][3]}
        assert set(lines[0][3].values()) == {0.0}
        assert all(norm > 0 for norm in lines[-1][3].values())
    gates = metrics(arms["gated"], "residual", "gates")
    assert set(gates[0][0]) == {f"model.residual.reads.{i}.gate" for i in range(4)}
    assert set(gates[0][0].values()) == {0.0}
    assert 0.0 not in gates[-1][0].values()


@pytest.mark.parametrize("residual", [{"scheme": "hyper_connections"}, {"scheme": "additive"}])
def test_schemes_without_reads_have_no_readings(residual):
    assert read_parameters(routed(residual)) == {"gates": {}, "query_norms": {}}


def test_the_summary_names_the_errors_and_the_average(arms):
    summary = json.loads((arms["gated"] / "summary.json").read_text(encoding="utf-8"))
    last = metrics(arms["gated"], "evaluation", "loss", "stderr", "ema_loss", "ema_stderr")[-1]
    keys = ("final_loss", "final_stderr", "final_ema_loss", "final_ema_stderr")
    assert tuple(summary[key] for key in keys) == last
    assert all(error > 0 for error in last[1::2])


def test_final_models_load_and_keep_the_checkpoints_tokenizer(arms, checkpoint):
    for out in arms.values():
        for folder in ("final", "final-ema"):
            assert AutoModelForCausalLM.from_pretrained(out / folder).config.residual["scheme"]
            assert (out / folder / "tokenizer.json").is_file()


def test_another_checkpoint_is_another_start(arms, corpus, tmp_path):
    from support.small_runs import write_checkpoint

    other = write_checkpoint(tmp_path / "other", seed=1)
    train(mid_training(corpus, other, "control", "training.steps=4"), tmp_path / "run")
    assert metrics(tmp_path / "run", "evaluation", "loss")[0] != metrics(arms["control"], "evaluation", "loss")[0]


def test_the_arms_of_the_shipped_study_differ_in_their_routing_alone():
    found = {run.arm: run.recipe for run in runs(load_study("studies/mid-training"))}
    assert list(found) == ["control", "gated", "sum-scaled"]
    assert found["control"].residual == {"scheme": "additive"}
    assert found["sum-scaled"].residual["read_scale"] == "sum"
    for recipe in found.values():
        differ = differing_keys(recipe, load_recipe("mid-training"))
        assert all(key == "name" or key.startswith("residual.") for key in differ)
        optimizer, training = recipe.optimizer, recipe.training
        assert optimizer.learning_rate * optimizer.min_lr_ratio == pytest.approx(4e-6)
        assert (optimizer.decay, optimizer.weight_decay, optimizer.residual_weight_decay) == ("projections", 0.05, 0)
        assert (optimizer.z_loss, training.ema_decay, training.evaluate_first) == (1e-4, 0.999, True)
        assert recipe.data.max_tokens == training.steps * training.batch_size * recipe.data.sequence_length


@pytest.mark.parametrize("arm", ["gated", "sum-scaled"])
@pytest.mark.parametrize("step", [2, 6])
def test_an_arm_killed_before_or_after_its_first_checkpoint_goes_on_bit_for_bit(
    arms, corpus, checkpoint, tmp_path, arm, step
):
    recipe = mid_training(corpus, checkpoint, arm)

    def work() -> None:
        whole = hf_trainer.RecipeTrainer.training_step

        def training_step(self, *args, **kwargs):
            return kill_self() if self.state.global_step == step else whole(self, *args, **kwargs)

        hf_trainer.RecipeTrainer.training_step = training_step
        train(recipe, tmp_path)

    assert end_of(start(work)) == -signal.SIGKILL
    train(recipe, tmp_path)
    assert without_times(tmp_path) == without_times(arms[arm])
    for folder in ("final", "final-ema"):
        models = [AutoModelForCausalLM.from_pretrained(out / folder).state_dict() for out in (tmp_path, arms[arm])]
        assert all(torch.equal(value, models[1][name]) for name, value in models[0].items())


@pytest.mark.parametrize("arm", ["gated", "sum-scaled"])
def test_checkpointing_and_bf16_keep_fp32_weights(corpus, checkpoint, tmp_path, arm):
    overrides = ("training.steps=4", "training.precision=bf16", "training.gradient_checkpointing=true")
    train(mid_training(corpus, checkpoint, arm, *overrides), tmp_path)
    for folder in ("final", "final-ema"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype="auto")
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_the_control_is_the_stock_model_and_nothing_else(corpus, checkpoint):
    recipe = mid_training(corpus, checkpoint, "control")
    model = build_model(recipe, load_tokenizer("embedded"))
    stock = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert dict(model.named_parameters()).keys() == dict(stock.named_parameters()).keys()
