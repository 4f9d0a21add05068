"""The held-out loss as a mean over tokens, with the standard error that the choice of sequences gives it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class HeldOutLoss:
    """The mean loss over `num_tokens` predicted tokens, in nats.

    `stderr`: its standard error over sequences: the standard deviation of their mean losses (n - 1 in the
    denominator) divided by the square root of their number; None for a single sequence.
    """

    mean: float
    stderr: float | None
    num_tokens: int

    @classmethod
    def of(cls, sums: Tensor) -> HeldOutLoss:
        """From `summed_loss`, summed over the ranks."""
        total, tokens, n, means, squares = sums.tolist()
        variance = max(0.0, squares - means**2 / n) / (n - 1) if n > 1 else None
        return cls(total / tokens, None if variance is None else math.sqrt(variance / n), int(tokens))


@torch.no_grad()
def summed_loss(
    model: nn.Module, sequences: Sequence[Mapping[str, Tensor]] | Any, batch_size: int, *, rank: int = 0, ranks: int = 1
) -> Tensor:
    """What `HeldOutLoss.of` needs, as sums: fp64, shape (5,), on the CPU.

    The loss summed over predicted tokens, in nats, and their number; the number of sequences, the sum of their mean
    losses and of the squares of these. Batches of `batch_size` sequences (`input_ids` and `labels`, (T,) each) are
    dealt to the ranks in turn; the sums of all ranks add up to those of the whole set, whatever the batches. Every
    rank calls the model equally often, as sharded models need. Evaluation mode while it runs.
    """
    device = next(model.parameters()).device
    losses: list[Tensor] = [torch.zeros(0, device=device, dtype=torch.float64)]
    counts: list[Tensor] = [torch.zeros(0, dtype=torch.float64)]
    was_training = model.training
    model.eval()
    for start in range(0, len(sequences), batch_size * ranks):
        first = start + rank * batch_size
        batch = [sequences[i] for i in range(first, min(first + batch_size, len(sequences)))]
        shown = batch or [sequences[0]]  # a rank without a share takes part, and its result does not count
        ids, labels = (torch.stack([item[key] for item in shown]) for key in ("input_ids", "labels"))
        found = _sequence_losses(model(input_ids=ids.to(device), use_cache=False).logits, labels.to(device))
        losses.append(found[: len(batch)])
        counts.append((labels[: len(batch), 1:] != -100).sum(1).double())
    model.train(was_training)
    # One copy to the CPU at the end, so that the device never waits in between.
    totals, tokens = torch.cat(losses).cpu(), torch.cat(counts)
    means = totals / tokens
    return torch.stack([totals.sum(), tokens.sum(), torch.tensor(len(means)), means.sum(), means.square().sum()])


def held_out_loss(model: nn.Module, sequences: Sequence[Mapping[str, Tensor]] | Any, batch_size: int) -> HeldOutLoss:
    """The loss of a model over sequences of tokens."""
    return HeldOutLoss.of(summed_loss(model, sequences, batch_size))


def mean_loss(model: nn.Module, sequences: Sequence[Mapping[str, Tensor]] | Any, batch_size: int) -> float:
    """The loss of a model over sequences of tokens, as a mean over tokens, in nats."""
    return held_out_loss(model, sequences, batch_size).mean


def _sequence_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Logits (B, T, V) and labels (B, T) -> the loss of each sequence, summed over its predicted tokens: fp64 (B,)."""
    # Row by row: in fp32 the logits of all of them can be larger than the model.
    rows = zip(logits[:, :-1], labels[:, 1:], strict=True)
    return torch.stack([F.cross_entropy(row.float(), wanted, reduction="none").double().sum() for row, wanted in rows])
