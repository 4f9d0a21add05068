"""What training minimises: cross-entropy and z-loss, the latter in training alone and whatever the batches."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from depthroute.training import train
from depthroute.training.objective import mean_square_log_normalizer, return_objective
from support.models import routed, tokens
from support.small_runs import assert_close, metrics, small_recipe

WEIGHT = 0.01


def explicit(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over predicted tokens of (log sum exp)^2, in fp64, token by token."""
    squares = [
        torch.log(torch.exp(row[t].double()).sum()) ** 2
        for row, wanted in zip(logits, labels, strict=True)
        for t in range(len(wanted) - 1)
        if wanted[t + 1] != -100
    ]
    return torch.stack(squares).mean()


def test_it_is_the_mean_square_of_the_log_of_the_normalizer():
    logits, labels = torch.randn(2, 5, 11) * 3, torch.randint(11, (2, 5))
    labels[1, 2:] = -100
    torch.testing.assert_close(mean_square_log_normalizer(logits, labels).double(), explicit(logits, labels))


def test_parts_of_a_batch_sum_to_the_whole():
    logits, labels = torch.randn(4, 5, 11), torch.randint(11, (4, 5))
    parts = [mean_square_log_normalizer(logits[i : i + 2], labels[i : i + 2], num_items=16) for i in (0, 2)]
    torch.testing.assert_close(sum(parts), mean_square_log_normalizer(logits, labels))


def test_a_model_in_training_returns_cross_entropy_and_z_loss_and_no_logits():
    model, ids = routed({"scheme": "delta_mhar"}), tokens()
    logits = model(input_ids=ids).logits
    cross_entropy = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    return_objective(model, WEIGHT)
    output = model.train()(input_ids=ids, labels=ids)
    assert output.logits is None
    expected = cross_entropy + WEIGHT * explicit(logits, ids).float()
    torch.testing.assert_close(output.loss, expected, atol=1e-6, rtol=0)


def test_it_has_a_gradient_and_evaluation_is_without_it():
    gradients = []
    for weight in (0.0, WEIGHT):
        model, ids = routed({"scheme": "additive"}), tokens()
        plain = model(input_ids=ids, labels=ids)
        return_objective(model, weight)
        evaluated = model.eval()(input_ids=ids, labels=ids)
        assert torch.equal(evaluated.loss, plain.loss)
        assert torch.equal(evaluated.logits, plain.logits)
        model.train()(input_ids=ids, labels=ids).loss.backward()
        gradients.append(model.lm_head.weight.grad)
    assert not torch.equal(*gradients)


@pytest.fixture(scope="module")
def with_z_loss(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("z")
    train(small_recipe(corpus, f"optimizer.z_loss={WEIGHT}"), out)
    return out


@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_accumulated_batches_have_the_z_loss_of_one_large_batch(with_z_loss, corpus, tmp_path, micro_batch_size):
    overrides = (f"optimizer.z_loss={WEIGHT}", f"training.micro_batch_size={micro_batch_size}")
    train(small_recipe(corpus, *overrides), tmp_path)
    assert_close(tmp_path, with_z_loss, tolerance=5e-6)


def test_the_first_training_loss_has_it_and_the_first_evaluation_has_not(finished, with_z_loss, corpus, tmp_path):
    (without,), (with_it,) = (metrics(out, "train", "loss")[0] for out in (finished, with_z_loss))
    # Logits near zero: the log of the normalizer is about log(2048).
    assert with_it - without == pytest.approx(WEIGHT * 7.6246**2, abs=0.005)
    first = []
    for weight in (0.0, WEIGHT):
        overrides = ("training.evaluate_first=true", "training.steps=4", f"optimizer.z_loss={weight}")
        train(small_recipe(corpus, *overrides), tmp_path / str(weight))
        first.append(metrics(tmp_path / str(weight), "evaluation", "step", "loss")[0])
    assert first[0] == first[1]
    assert first[0][0] == 0
