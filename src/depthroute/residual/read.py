"""A read site: the parameters of one read over depth, and the read itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from depthroute.ops import depth_mix


class DepthRead(nn.Module):
    """One read over depth: a query, the weight of its key norm, and the mix that they make of the sources.

    Queries start at zero, so a fresh read is the uniform mean of its sources (arXiv 2603.15031, 2607.27230).
    The parameters are the module's own: transformers initialises a module only where it has parameters of its own.

    Args:
        width: D, the width of the sources.
        num_heads: H, the route heads; each reads a slice of D / H channels with its own softmax.
        scale: temperature, the factor on the logits.
        eps: of the RMS norm of the keys.
        backend: of `depthroute.depth_mix`.
    """

    def __init__(self, width: int, num_heads: int, *, scale: float = 1.0, eps: float = 1e-6, backend: str = "auto"):
        super().__init__()
        self.num_heads = num_heads
        self.scale = scale
        self.eps = eps
        self.backend = backend
        self.query = nn.Parameter(torch.empty(width))
        self.norm_weight = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        # Whole parameters, through the module `nn.init`: transformers guards these calls while it loads a checkpoint.
        nn.init.zeros_(self.query)
        nn.init.ones_(self.norm_weight)

    def forward(self, sources: Sequence[Tensor]) -> Tensor:
        """N sources (B, T, D) -> their mix (B, T, D)."""
        return depth_mix(
            sources,
            self.query,
            num_heads=self.num_heads,
            norm_weight=self.norm_weight,
            eps=self.eps,
            scale=self.scale,
            backend=self.backend,
        )

    def weights(self, sources: Sequence[Tensor]) -> Tensor:
        """N sources (B, T, D) -> the weights (N, B, T, H) with which `forward` mixes them, in fp32."""
        _, weights = depth_mix(
            sources,
            self.query,
            num_heads=self.num_heads,
            norm_weight=self.norm_weight,
            eps=self.eps,
            scale=self.scale,
            return_weights=True,
        )
        return weights

    def extra_repr(self) -> str:
        return f"width={self.query.numel()}, num_heads={self.num_heads}, scale={self.scale}"
