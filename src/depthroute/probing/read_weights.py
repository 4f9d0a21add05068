"""How much each site reads each source, averaged over a text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from depthroute.probing.taps import decoder_of, tap_reads
from depthroute.residual import DepthRead
from depthroute.residual.base import sublayer_name


def mean_read_weights(model: nn.Module, batches: Iterable[Mapping[str, Tensor] | Tensor]) -> list[dict[str, Any]]:
    """Token-averaged routing weights of every site that reads.

    `batches` are token ids (B, T), or mappings with `input_ids` and perhaps an `attention_mask` (its zeros are not
    counted), as a data loader gives them. One dict for each reading site, in order:
    `site` (its index), `name` ("attention 3", "mlp 3", "final"), `sources` (N names), `weights` (H lists of N means,
    each summing to 1) and `tokens` (how many the mean is over). A scheme without reads gives an empty list.
    One pass, in evaluation mode, without gradients or language-model head; memory does not grow with the text.
    Raises ValueError if there is no batch, or no token to count.
    """
    decoder = decoder_of(model)
    residual = decoder.residual
    device = next(model.parameters()).device
    sums: dict[int, Tensor] = {}
    tokens = 0
    counted: Tensor | None = None

    def add(site: int, read: DepthRead, sources: tuple[Tensor, ...]) -> None:
        weights = read.weights(sources)  # (N, B, T, H)
        if counted is not None:
            weights = weights.masked_fill(counted[..., None] == 0, 0.0)
        total = weights.sum(dim=(1, 2), dtype=torch.float64)
        sums[site] = sums[site] + total if site in sums else total

    with torch.no_grad(), _evaluation_mode(model), tap_reads(model, add):
        for batch in batches:
            inputs = {"input_ids": batch} if isinstance(batch, Tensor) else batch
            ids = inputs["input_ids"].to(device)
            mask = inputs.get("attention_mask")
            counted = None if mask is None else mask.to(device)
            tokens += ids.numel() if counted is None else int(counted.sum())
            decoder(input_ids=ids, attention_mask=counted, use_cache=False)
            if not sums:  # a scheme without reads: the rest of the text would show nothing
                return []
    if not tokens:
        raise ValueError("batches: there is no token to average over; wanted at least one batch of token ids")
    return [
        {
            "site": site,
            "name": "final" if site == residual.num_sites - 1 else sublayer_name(site),
            "sources": list(residual.source_names(site)),
            "weights": (sums[site] / tokens).T.tolist(),
            "tokens": tokens,
        }
        for site in sorted(sums)
    ]


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
