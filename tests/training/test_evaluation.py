"""The held-out loss: a mean over tokens, however it is dealt out."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from depthroute.data import load_tokenizer, prepare
from depthroute.training.evaluation import HeldOutLoss, held_out_loss, mean_loss, summed_loss
from depthroute.training.model_building import build_model
from support.small_runs import small_recipe


@pytest.fixture(scope="module")
def model(corpus):
    torch.manual_seed(0)
    return build_model(small_recipe(corpus), load_tokenizer("embedded"))


@pytest.fixture(scope="module")
def sequences(corpus, tmp_path_factory):
    return prepare(small_recipe(corpus).data, tmp_path_factory.mktemp("cache")).validation


def test_it_is_the_mean_of_the_losses_of_all_predicted_tokens(model, sequences):
    ids = torch.stack([sequences[i]["input_ids"] for i in range(len(sequences))])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), ids[:, 1:].flatten())
    assert mean_loss(model, sequences, 8) == pytest.approx(expected.item(), abs=1e-6)


def test_its_standard_error_is_that_of_the_mean_over_sequences(model, sequences):
    alone = [mean_loss(model, [sequences[i]], 1) for i in range(len(sequences))]
    found = held_out_loss(model, sequences, 8)
    assert found.stderr == pytest.approx(statistics.stdev(alone) / math.sqrt(len(alone)), rel=1e-6)
    assert found.mean == pytest.approx(statistics.fmean(alone), abs=1e-6)
    assert found.sequences == pytest.approx(alone, abs=1e-6)
    assert found.num_tokens == 31 * 15
    assert held_out_loss(model, [sequences[0]], 1).stderr is None


def test_labels_that_are_left_out_do_not_count(model, sequences):
    labels = sequences[0]["labels"].clone()
    labels[8:] = -100
    half = [sequences[1], {"input_ids": sequences[0]["input_ids"], "labels": labels}]
    with torch.no_grad():
        parts = [model(input_ids=item["input_ids"][None], labels=item["labels"][None]).loss.item() for item in half]
    found = held_out_loss(model, half, 2)
    assert found.num_tokens == 15 + 7
    assert found.mean == pytest.approx((15 * parts[0] + 7 * parts[1]) / 22, abs=1e-6)
    assert found.stderr == pytest.approx(abs(parts[0] - parts[1]) / 2, abs=1e-6)


@pytest.mark.parametrize("batch_size", [1, 7, 100])
def test_it_does_not_depend_on_the_batches(model, sequences, batch_size):
    assert mean_loss(model, sequences, batch_size) == pytest.approx(mean_loss(model, sequences, 8), abs=1e-6)


@pytest.mark.parametrize("batch_size", [4, 30])
def test_the_shares_of_the_ranks_add_up_and_every_rank_calls_the_model_equally_often(model, sequences, batch_size):
    assert len(sequences) == 31  # with 30 at once the third rank has nothing to do
    calls: list[int] = []
    hook = model.register_forward_hook(lambda *_: calls.append(1))
    shares, counts = [], []
    for rank in range(3):
        calls.clear()
        shares.append(summed_loss(model, sequences, batch_size, rank=rank, ranks=3))
        counts.append(len(calls))
    hook.remove()
    assert len(set(counts)) == 1
    torch.testing.assert_close(sum(shares), summed_loss(model, sequences, 8), atol=1e-4, rtol=0)
    assert sum(shares)[1].tolist() == [15] * 31
    found, expected = HeldOutLoss.of(sum(shares)), held_out_loss(model, sequences, 8)
    assert found.stderr == pytest.approx(expected.stderr, rel=1e-5)


def test_it_leaves_the_model_as_it_was(model, sequences):
    for mode in (True, False):
        model.train(mode)
        mean_loss(model, sequences, 8)
        assert model.training is mode
        assert all(p.grad is None for p in model.parameters())
