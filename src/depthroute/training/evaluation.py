"""The held-out loss as a mean over tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


@torch.no_grad()
def summed_loss(
    model: nn.Module, sequences: Sequence[Mapping[str, Tensor]] | Any, batch_size: int, *, rank: int = 0, ranks: int = 1
) -> Tensor:
    """The loss summed over predicted tokens, in nats, and their number: fp64, shape (2,), on the CPU.

    Batches of `batch_size` sequences (`input_ids` and `labels`, (T,) each) are dealt to the ranks in turn; the sums of
    all ranks add up to those of the whole set, and their quotient is the mean over tokens, whatever the batches. Every
    rank calls the model equally often, as sharded models need. Evaluation mode while it runs.
    """
    device = next(model.parameters()).device
    losses: list[Tensor] = []
    counts: list[int] = []
    was_training = model.training
    model.eval()
    for start in range(0, len(sequences), batch_size * ranks):
        first = start + rank * batch_size
        batch = [sequences[i] for i in range(first, min(first + batch_size, len(sequences)))]
        shown = batch or [sequences[0]]  # a rank without a share takes part, and its result does not count
        ids, labels = (torch.stack([item[key] for item in shown]) for key in ("input_ids", "labels"))
        output = model(input_ids=ids.to(device), labels=labels.to(device), use_cache=False)
        losses.append(output.loss.detach().float())
        counts.append(int((labels[:, 1:] != -100).sum()) if batch else 0)
    model.train(was_training)
    count = torch.tensor(counts, dtype=torch.float64)
    # One copy to the CPU at the end, so that the device never waits in between.
    return torch.stack([(torch.stack(losses).cpu().double() * count).sum(), count.sum()])


def mean_loss(model: nn.Module, sequences: Sequence[Mapping[str, Tensor]] | Any, batch_size: int) -> float:
    """The loss of a model over sequences of tokens, as a mean over tokens, in nats."""
    total, count = summed_loss(model, sequences, batch_size).tolist()
    return total / count
