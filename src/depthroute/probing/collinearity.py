"""How alike the sources of a site are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthroute.probing.text_pass import Batches, add_to, describe_site, pass_over
from depthroute.residual import DepthRead


class CollinearityProbe:
    """Collects the mean pairwise cosine of the sources of each site; an observer of `pass_over`."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}

    def __call__(self, site: int, read: DepthRead, sources: tuple[Tensor, ...], counted: Tensor) -> None:
        if len(sources) < 2:
            return
        # The cosines of all pairs are in the square of the sum of the unit vectors, so no pair is ever formed.
        units = torch.zeros_like(sources[0], dtype=torch.float32)
        squares = torch.zeros_like(units[..., 0])
        for source in sources:
            unit = F.normalize(source.float(), dim=-1)
            units += unit
            squares += unit.square().sum(-1)  # 1, or 0 for a source that is zero
        pairs = len(sources) * (len(sources) - 1)
        cosine = (units.square().sum(-1) - squares) / pairs
        add_to(self._sums, site, (cosine.double() * counted.sum(0)).sum())

    def result(self, model: nn.Module, tokens: int) -> dict[str, Any]:
        """As `source_collinearity` returns it; None for the mean where no site has two sources."""
        sites = [
            {**describe_site(model, site), "cosine": float(self._sums[site]) / tokens} for site in sorted(self._sums)
        ]
        mean = sum(site["cosine"] for site in sites) / len(sites) if sites else None
        return {"cosine": mean, "tokens": tokens, "sites": sites}


def source_collinearity(model: nn.Module, batches: Batches) -> dict[str, Any]:
    """Mean pairwise cosine of the sources of a site, over tokens and pairs: for each site, and the mean over sites.

    A source that is zero (a fresh null source) has cosine 0 with every other. `batches` as in `pass_over`.
    """
    probe = CollinearityProbe()
    tokens = sum(pass_over(model, batches, probe))
    return probe.result(model, tokens)
