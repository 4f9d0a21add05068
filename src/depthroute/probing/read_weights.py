"""How much each site reads each source, averaged over a text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from depthroute.probing.text_pass import Batches, add_to, describe_site, pass_over
from depthroute.residual import DepthRead


def mean_read_weights(model: nn.Module, batches: Batches) -> list[dict[str, Any]]:
    """Token-averaged routing weights of every site that reads.

    `batches` are token ids (B, T), or mappings with `input_ids` and perhaps an `attention_mask` (its zeros are not
    counted), as a data loader gives them. One dict for each reading site, in order:
    `site` (its index), `name` ("attention 3", "mlp 3", "final"), `sources` (N names), `weights` (H lists of N means,
    each summing to 1) and `tokens` (how many the mean is over). A scheme without reads gives an empty list.
    One pass, in evaluation mode, without gradients or language-model head; memory does not grow with the text.
    Raises ValueError if there is no batch, or no token to count.
    """
    sums: dict[int, Tensor] = {}

    def observe(site: int, read: DepthRead, sources: tuple[Tensor, ...], counted: Tensor) -> None:
        weights = read.weights(sources)  # (N, B, T, H)
        add_to(sums, site, torch.einsum("nbth,bt->hn", weights.double(), counted.sum(0)))

    tokens = sum(pass_over(model, batches, observe))
    return [
        {**describe_site(model, site), "weights": (sums[site] / tokens).tolist(), "tokens": tokens}
        for site in sorted(sums)
    ]
