"""The definition of a depth read in plain PyTorch. Every other implementation is held to this one."""

from collections.abc import Sequence

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of all arithmetic inside a read of sources of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def read_weight(query: Tensor, norm_weight: Tensor | None, scale: float, dtype: torch.dtype) -> Tensor:
    """scale * query * norm_weight, shape (D,): the one vector by which a read scores its sources."""
    weight = scale * query.to(dtype)
    return weight if norm_weight is None else weight * norm_weight.to(dtype)


def depth_mix(
    sources: Sequence[Tensor] | Tensor,
    query: Tensor,
    *,
    num_heads: int = 1,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    scale: float = 1.0,
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Mix of `sources` by a softmax over depth for each token and route head; arguments as `depthroute.depth_mix`.

    The sources are RMS-normed over the full width to be scored, and mixed as they are. Only the result is rounded.
    """
    sources = tuple(sources)
    dtype = accumulation_dtype(sources[0].dtype)
    weight = read_weight(query, norm_weight, scale, dtype).unflatten(-1, (num_heads, -1))  # (H, K)
    logits, values = [], []
    for source in sources:
        rows = source.to(dtype)  # (..., D)
        value = rows.unflatten(-1, (num_heads, -1))  # (..., H, K)
        rstd = torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)  # (..., 1)
        logits.append(rstd * (weight * value).sum(-1))  # (..., H)
        values.append(value)
    weights = torch.stack(logits).softmax(0)  # (N, ..., H)
    mix = sum(p.unsqueeze(-1) * value for p, value in zip(weights, values, strict=True))
    mix = mix.flatten(-2).to(sources[0].dtype)
    return (mix, weights) if return_weights else mix
