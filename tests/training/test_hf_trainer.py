"""What the subclass of Trainer changes in the model and in the batches."""

from __future__ import annotations

import pytest
import torch

from depthroute.data import load_tokenizer
from depthroute.training.hf_trainer import training_arguments
from depthroute.training.model_building import build_model
from depthroute.training.objective import return_objective
from support.small_runs import small_recipe


def test_a_model_in_training_returns_its_loss_alone_and_the_same_one(corpus):
    model = build_model(small_recipe(corpus), load_tokenizer("embedded"))
    ids = torch.arange(32).view(2, 16)
    whole = model.train()(input_ids=ids, labels=ids)
    return_objective(model, z_loss=0.0)
    alone = model(input_ids=ids, labels=ids)
    assert torch.equal(alone.loss, whole.loss)
    assert whole.logits is not None
    assert alone.logits is None
    assert torch.equal(model.eval()(input_ids=ids).logits, whole.logits)


@pytest.mark.parametrize(
    ("ranks", "overrides", "expected"),
    [
        (1, [], (8, 1)),
        (2, [], (4, 1)),
        (2, ["training.micro_batch_size=2"], (2, 2)),
        (1, ["training.micro_batch_size=1"], (1, 8)),
    ],
)
def test_the_batch_of_a_step_is_dealt_to_ranks_and_accumulated(
    corpus, tmp_path, monkeypatch, ranks, overrides, expected
):
    monkeypatch.setattr("depthroute.training.hf_trainer.TrainingArguments", _Arguments)
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    arguments = training_arguments(small_recipe(corpus, *overrides), tmp_path)
    assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == expected


class _Arguments:
    """Keeps what it is given: the real one would start a process group."""

    def __init__(self, **given) -> None:
        vars(self).update(given)


@pytest.mark.parametrize(("ranks", "least"), [(3, "2"), (16, "1")])
def test_a_batch_that_cannot_be_dealt_to_the_ranks_is_refused(corpus, tmp_path, monkeypatch, ranks, least):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with pytest.raises(ValueError, match=f"batch_size is 8, but should be a multiple of {least} .* on each of {ranks}"):
        training_arguments(small_recipe(corpus), tmp_path)
