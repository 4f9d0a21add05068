"""The average of the weights: what it is, that it is never lost, and that it leaves the model as it was."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from depthroute.data import load_tokenizer, prepare
from depthroute.training import hf_trainer, train, trainer
from depthroute.training.ema import FILE, WeightEma
from depthroute.training.evaluation import held_out_loss
from depthroute.training.model_building import build_model
from depthroute.training.optim import build_optimizer
from support.small_runs import (
    STEPS,
    as_ranks,
    assert_close,
    end_of,
    kill_self,
    metrics,
    small_recipe,
    start,
    without_times,
)

DECAY = 0.8
OVERRIDES = (f"training.ema_decay={DECAY}", "training.save_every=1", "optimizer.learning_rate=1e-2")


@pytest.fixture(scope="module")
def recipe(corpus):
    return small_recipe(corpus, *OVERRIDES)


@pytest.fixture(scope="module")
def averaged(recipe, tmp_path_factory) -> Path:
    """A run with an average, and all of its checkpoints."""
    out = tmp_path_factory.mktemp("averaged")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf_trainer, "KEPT_CHECKPOINTS", STEPS)
        train(recipe, out)
    return out


def final(out: Path, folder: str = "final-ema") -> dict[str, torch.Tensor]:
    return load_file(out / folder / "model.safetensors")


def test_it_is_the_explicit_average_of_the_weights_of_all_steps(recipe, averaged):
    set_seed(recipe.seed)
    average = {
        name: p.detach().double() for name, p in build_model(recipe, load_tokenizer("embedded")).named_parameters()
    }
    for step in range(1, STEPS + 1):
        folder = averaged / f"checkpoint-{step}"
        weights, kept = load_file(folder / "model.safetensors"), load_file(folder / FILE)
        average = {name: DECAY * value + (1 - DECAY) * weights[name].double() for name, value in average.items()}
        assert kept.keys() == average.keys()
        assert all(value.dtype == torch.float32 for value in kept.values())
        for name, value in average.items():
            torch.testing.assert_close(kept[name].double(), value, atol=1e-6, rtol=0)
    last = load_file(averaged / f"checkpoint-{STEPS}" / FILE)
    assert all(torch.equal(value, final(averaged)[name]) for name, value in last.items())


def test_training_is_the_same_with_and_without_it(averaged, corpus, tmp_path):
    train(small_recipe(corpus, *OVERRIDES, "training.ema_decay=null"), tmp_path)
    plain, other = final(tmp_path, "final"), final(averaged, "final")
    assert all(torch.equal(value, other[name]) for name, value in plain.items())
    assert metrics(tmp_path, "train", "loss") == metrics(averaged, "train", "loss")
    assert metrics(tmp_path, "evaluation", "loss", "stderr") == metrics(averaged, "evaluation", "loss", "stderr")
    assert not (tmp_path / "final-ema").exists()


def test_the_saved_average_is_an_ordinary_model_with_the_loss_of_the_last_evaluation(recipe, averaged):
    model = AutoModelForCausalLM.from_pretrained(averaged / "final-ema")
    validation = prepare(recipe.data, averaged.parent / "cache").validation
    found = held_out_loss(model, validation, 8)
    summary = json.loads((averaged / "summary.json").read_text(encoding="utf-8"))
    ((loss, ema_loss, ema_stderr),) = metrics(averaged, "evaluation", "loss", "ema_loss", "ema_stderr")[-1:]
    assert (found.mean, found.stderr) == (ema_loss, ema_stderr)
    assert (summary["final_ema_loss"], summary["final_ema_stderr"]) == (ema_loss, ema_stderr)
    assert ema_loss != loss
    assert len(AutoTokenizer.from_pretrained(averaged / "final-ema")) == len(load_tokenizer("embedded"))


def test_the_decay_changes_it(averaged, corpus, tmp_path):
    train(small_recipe(corpus, *OVERRIDES, "training.ema_decay=0.5"), tmp_path)
    assert metrics(tmp_path, "evaluation", "ema_loss") != metrics(averaged, "evaluation", "ema_loss")


def kill_in_the_ninth_step() -> None:
    whole = hf_trainer.RecipeTrainer.training_step

    def step(self, *args, **kwargs):
        return kill_self() if self.state.global_step == 8 else whole(self, *args, **kwargs)

    hf_trainer.RecipeTrainer.training_step = step


def kill_between_the_two_models() -> None:
    whole = trainer.RecipeTrainer.save_final

    def save(self, folder, tokenizer):
        return kill_self() if folder.name == "final-ema" else whole(self, folder, tokenizer)

    trainer.RecipeTrainer.save_final = save


@pytest.mark.compat
@pytest.mark.parametrize("kill", [kill_in_the_ninth_step, kill_between_the_two_models])
def test_a_killed_run_goes_on_with_it_bit_for_bit(recipe, averaged, tmp_path, kill):
    def work() -> None:
        kill()
        train(recipe, tmp_path)

    assert end_of(start(work)) == -signal.SIGKILL
    assert not (tmp_path / "final-ema").exists()
    train(recipe, tmp_path)
    assert without_times(tmp_path) == without_times(averaged)
    assert all(torch.equal(value, final(averaged)[name]) for name, value in final(tmp_path).items())


@pytest.mark.compat
def test_two_ranks_under_ddp_have_the_average_of_one_process(averaged, recipe, tmp_path):
    as_ranks(lambda _: train(recipe, tmp_path))
    assert_close(tmp_path, averaged, tolerance=2e-6)
    for name, value in final(tmp_path).items():
        torch.testing.assert_close(value, final(averaged)[name], atol=5e-6, rtol=0)
    found, expected = (metrics(out, "evaluation", "ema_loss", "ema_stderr") for out in (tmp_path, averaged))
    assert found == [pytest.approx(pair, abs=2e-6) for pair in expected]


def run(recipe, out: Path, *, shard: bool) -> list[float]:
    """Three steps on random tokens with an average, which is saved, loaded and evaluated; its losses."""
    set_seed(0)
    model = build_model(recipe, load_tokenizer("embedded"))
    if shard:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer, ema = build_optimizer(model, recipe.optimizer), WeightEma(DECAY)
    ema.start(model)
    ids = torch.randint(2048, (3, 2, 8), generator=torch.Generator().manual_seed(0))
    sequences = [{"input_ids": row, "labels": row} for row in ids.flatten(0, 1)]
    for batch in ids:
        model.train()(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
    before = held_out_loss(model, sequences, 2).mean
    out.mkdir(exist_ok=True)
    ema.save(out, is_main=not shard or dist.get_rank() == 0)
    if shard:
        dist.barrier()
    restored = WeightEma(DECAY)
    restored.start(model)
    restored.load(out)
    losses = []
    for average in (ema, restored):
        with average.in_the_model():
            losses.append(held_out_loss(model, sequences, 2).mean)
    assert held_out_loss(model, sequences, 2).mean == before
    return [before, *losses]


def loaded(recipe, folder: Path) -> dict[str, torch.Tensor]:
    """The average of a checkpoint that shards have made, as one process goes on with it."""
    ema = WeightEma(DECAY)
    ema.start(build_model(recipe, load_tokenizer("embedded")))
    ema.load(folder)
    return ema._averages


@pytest.mark.parametrize("residual", ["{scheme: delta_mhar, block_layers: 1}", "{scheme: mhar, read_scale: sum}"])
def test_under_fsdp2_the_sharded_average_is_that_of_one_process(corpus, tmp_path, residual):
    recipe = small_recipe(corpus, f"residual={residual}", "optimizer.learning_rate=1e-2")
    expected = run(recipe, tmp_path / "one", shard=False)
    assert expected[1] == expected[2] != expected[0]

    def work(rank: int) -> None:
        dist.init_process_group("gloo")
        found = run(recipe, tmp_path / "two", shard=True)
        (tmp_path / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
        dist.destroy_process_group()

    as_ranks(work)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))
        assert found == pytest.approx(expected, abs=1e-6)
    two = loaded(recipe, tmp_path / "two")
    for name, value in load_file(tmp_path / "one" / FILE).items():
        torch.testing.assert_close(two[name], value, atol=1e-6, rtol=0)


def test_weights_of_lower_precision_are_averaged_in_fp32():
    model = nn.Linear(4, 4).bfloat16()
    ema = WeightEma(0.999)
    ema.start(model)
    kept = model.weight.detach().clone()
    expected = kept.float()
    for _ in range(3):
        with torch.no_grad():
            model.weight.add_(0.5)
        ema.update()
        expected.lerp_(model.weight.detach().float(), 1 - 0.999)
    own = model.weight.detach().clone()
    assert ema._averages["weight"].dtype == torch.float32
    torch.testing.assert_close(ema._averages["weight"], expected)
    with ema.in_the_model():
        assert torch.equal(model.weight, expected.bfloat16())
    assert torch.equal(model.weight, own)
