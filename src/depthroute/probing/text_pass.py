"""One pass of a model over a text, with observers at its reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from depthroute.probing.taps import decoder_of, tap_reads
from depthroute.residual import DepthRead
from depthroute.residual.base import sublayer_name

# Called with the site, its read, its sources (B, T, D) and `counted` (2, B, T) in fp64: 1 for each token that counts,
# in the half of the text that it belongs to.
Observer = Callable[[int, DepthRead, tuple[Tensor, ...], Tensor], object]
Batches = Iterable[Mapping[str, Tensor] | Tensor]


def pass_over(model: nn.Module, batches: Batches, *observers: Observer) -> tuple[int, int]:
    """Shows every read of the model on a text to the observers; returns the tokens counted in each half of the text.

    `batches` are token ids (B, T), or mappings with `input_ids` and perhaps an `attention_mask` (its zeros do not
    count) and `half` (B,), 0 or 1 for the half of the text that a sequence belongs to; without it sequences belong to
    the halves in turn. Evaluation mode, no gradients, no language-model head, no cache; nothing of one batch is kept
    for the next. A scheme without reads ends the pass after the first batch.
    Raises ValueError if there is no batch, or no token to count.
    """
    decoder = decoder_of(model)
    device = next(model.parameters()).device
    tokens, rows, reads = [0, 0], 0, 0
    counted = torch.empty(0)

    def show(site: int, read: DepthRead, sources: tuple[Tensor, ...]) -> None:
        nonlocal reads
        reads += 1
        for observe in observers:
            observe(site, read, sources, counted)

    with torch.no_grad(), _evaluation_mode(model), tap_reads(model, show):
        for batch in batches:
            inputs = {"input_ids": batch} if isinstance(batch, Tensor) else batch
            ids, mask = inputs["input_ids"].to(device), inputs.get("attention_mask")
            mask = None if mask is None else mask.to(device)
            half = inputs.get("half", torch.arange(rows, rows + len(ids)) % 2).to(device)
            counted = _counted(ids, mask, half)
            rows += len(ids)
            tokens = [seen + int(new) for seen, new in zip(tokens, counted.sum((1, 2)), strict=True)]
            decoder(input_ids=ids, attention_mask=mask, use_cache=False)
            if not reads:
                break
    if not sum(tokens):
        raise ValueError("batches: there is no token to average over; wanted at least one batch of token ids")
    return tokens[0], tokens[1]


def describe_site(model: nn.Module, site: int) -> dict[str, Any]:
    """`site` (its index), `name` ("attention 3", "mlp 3", "final") and `sources` (their names)."""
    residual = decoder_of(model).residual
    name = "final" if site == residual.num_sites - 1 else sublayer_name(site)
    return {"site": site, "name": name, "sources": list(residual.source_names(site))}


def add_to(sums: dict[int, Tensor], site: int, value: Tensor) -> None:
    """Adds to the sum of a site, which starts at zero."""
    sums[site] = sums[site] + value if site in sums else value


def _counted(ids: Tensor, mask: Tensor | None, half: Tensor) -> Tensor:
    counts = torch.ones_like(ids) if mask is None else mask
    in_half = half == torch.arange(2, device=half.device)[:, None]  # (2, B)
    return in_half[..., None].double() * counts.double()


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
