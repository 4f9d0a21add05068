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
    """The mean loss over `num_tokens` predicted tokens, in nats, and the mean loss of each sequence.

    `stderr`: the standard error of the mean over sequences: the standard deviation of their losses (n - 1 in the
    denominator) divided by the square root of their number; None for a single sequence.
    """

    mean: float
    stderr: float | None
    num_tokens: int
    sequences: tuple[float, ...]

    @classmethod
    def of(cls, sums: Tensor) -> HeldOutLoss:
        """From what `summed_loss` gives, added up over the ranks."""
        losses, tokens = sums.cpu()
        means = losses / tokens
        n = len(means)
        stderr = means.std().item() / math.sqrt(n) if n > 1 else None
        return cls((losses.sum() / tokens.sum()).item(), stderr, int(tokens.sum()), tuple(means.tolist()))


@torch.no_grad()
def summed_loss(
    model: nn.Module, sequences: Sequence[Mapping[str, Tensor]] | Any, batch_size: int, *, rank: int = 0, ranks: int = 1
) -> Tensor:
    """For each of n sequences its loss summed over predicted tokens, in nats, and their number: fp64, shape (2, n).

    Batches of `batch_size` sequences (`input_ids` and `labels`, (T,) each) are dealt to the ranks in turn. What other
    ranks have done is zero, so that the results of all ranks add up to those of one. Every rank calls the model
    equally often, as sharded models need. Evaluation mode while it runs.
    """
    device = next(model.parameters()).device
    sums = torch.zeros(2, len(sequences), dtype=torch.float64, device=device)
    was_training = model.training
    model.eval()
    for start in range(0, len(sequences), batch_size * ranks):
        first = start + rank * batch_size
        last = min(first + batch_size, len(sequences))
        shown = [sequences[i] for i in range(first, last)] or [sequences[0]]  # every rank takes part
        ids, labels = (torch.stack([item[key] for item in shown]).to(device) for key in ("input_ids", "labels"))
        logits = model(input_ids=ids, use_cache=False).logits
        if first < last:
            sums[0, first:last] = _sequence_losses(logits, labels)
            sums[1, first:last] = (labels[:, 1:] != -100).sum(1).double()
    model.train(was_training)
    return sums


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
