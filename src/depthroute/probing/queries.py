"""The query of a read beside random ones of the same norm, and the logits that parts of them give."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from depthroute.ops.reference import accumulation_dtype, read_weight
from depthroute.residual import DepthRead


def with_random_queries(read: DepthRead, site: int, draws: int, seed: int) -> Tensor:
    """(1 + draws, D): the query of a read, then random directions of the same norm.

    They depend on (seed, site) alone, on every device.
    """
    query = read.query.detach()
    generator = torch.Generator().manual_seed(10_007 * seed + site)
    directions = torch.randn(draws, query.numel(), generator=generator, dtype=torch.float64)
    directions /= directions.norm(dim=1, keepdim=True)
    norm = query.double().norm().cpu()
    return torch.cat([query[None], (directions * norm).to(query)])


def part_weights(read: DepthRead, queries: Tensor, parts: Tensor) -> Tensor:
    """(D, R * P): the vectors by which part p of query r scores a source; queries (R, D), parts (P, D) factors."""
    weights = read_weight(queries, read.norm_weight, read.scale, accumulation_dtype(queries.dtype))
    return (weights[:, None] * parts.to(weights)).flatten(0, 1).T


def part_logits(read: DepthRead, sources: Sequence[Tensor], weights: Tensor) -> Tensor:
    """(N, B, T, R * P): what each part of each query adds to the logit of each source, as the read itself has it.

    Sources are normed over their full width, whatever the part.
    """
    dtype = accumulation_dtype(sources[0].dtype)
    logits = []
    with torch.autocast(sources[0].device.type, enabled=False):
        for source in sources:
            rows = source.to(dtype)
            rstd = torch.rsqrt(rows.square().mean(-1, keepdim=True) + read.eps)
            logits.append(rstd * (rows @ weights.to(dtype)))
    return torch.stack(logits)


def slice_masks(width: int, count: int, device: torch.device) -> Tensor:
    """(count, width): ones on each of `count` contiguous slices in turn."""
    return torch.eye(count, device=device).repeat_interleave(width // count, dim=1)


def beside_null(values: Sequence[float], name: str) -> dict[str, Any]:
    """A reading of the trained query, the first of `values`, and of the random ones, the others.

    `null` is the mean over the draws, `null_sd` their standard deviation (None for one draw), `excess` the difference.
    """
    trained, *random = values
    null = fmean(random)
    return {
        name: trained,
        "null": null,
        "null_sd": stdev(random) if len(random) > 1 else None,
        "excess": trained - null,
    }


def check_draws(draws: int) -> None:
    """ValueError where there are no random queries to compare with."""
    if draws < 1:
        raise ValueError(f"draws is {draws}; wanted at least 1 random query")
