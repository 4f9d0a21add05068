"""Manifold-constrained hyper-connections: the streams are mixed by doubly stochastic matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthroute.residual.hyper_connections import Streams
from depthroute.residual.initialization import fill_
from depthroute.residual.options import check_count


class ManifoldConnection(nn.Module):
    """The weights of one site, made for each token from all of its streams (arXiv 2512.24880, equations 7 to 9).

    pre = sigmoid(a_pre * (x W_pre) + b_pre), post = 2 sigmoid(a_post * (x W_post) + b_post),
    mix = sinkhorn(exp(a_mix * (x W_mix) + b_mix)), with x the RMS-normed concatenation of the streams.

    The paper gives a = 0.01 at the start. It does not give the biases and projections, so these are ours: W = 0,
    and biases that make a fresh site a plain residual connection as in hyper-connections: it reads stream
    `site mod n` (sigmoid(4) = 0.98, the others 0.02), mixes next to nothing, writes to every stream with weight 1.
    """

    def __init__(self, width: int, num_streams: int, site: int, iterations: int) -> None:
        super().__init__()
        n = num_streams
        self.num_streams, self.first_stream, self.iterations = n, site % n, iterations
        self.weight = nn.Parameter(torch.empty(n * width, 2 * n + n * n))  # W_pre, W_post, W_mix side by side
        self.scale = nn.Parameter(torch.empty(3))  # a_pre, a_post, a_mix
        self.pre_bias = nn.Parameter(torch.empty(n))
        self.post_bias = nn.Parameter(torch.empty(n))
        self.mix_bias = nn.Parameter(torch.empty(n, n))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.scale, 0.01)
        fill_(self.pre_bias, 8.0 * (torch.arange(self.num_streams) == self.first_stream) - 4.0)
        nn.init.zeros_(self.post_bias)
        fill_(self.mix_bias, 8.0 * torch.eye(self.num_streams) - 8.0)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Streams (B, T, n, D) -> weights to read (B, T, n), to mix (B, T, n, n) and to write (B, T, n)."""
        n, dtype = self.num_streams, streams.dtype
        x = streams.flatten(-2)
        logits = F.rms_norm(x, (x.shape[-1],), eps=1e-6) @ self.weight.to(dtype)
        pre, post, mix = logits.split((n, n, n * n), dim=-1)
        a_pre, a_post, a_mix = self.scale.to(dtype).unbind()
        pre = torch.sigmoid(a_pre * pre + self.pre_bias.to(dtype))
        post = 2 * torch.sigmoid(a_post * post + self.post_bias.to(dtype))
        mix = sinkhorn(a_mix * mix.unflatten(-1, (n, n)) + self.mix_bias.to(dtype), self.iterations)
        return pre, mix.transpose(-2, -1), post  # the paper's row i makes the new stream i


def sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """exp(logits) (..., n, n), columns and rows scaled to sum to one in turn: nearly doubly stochastic."""
    matrix = torch.exp(logits - logits.amax((-2, -1), keepdim=True))
    for _ in range(iterations):
        matrix = matrix / matrix.sum(-2, keepdim=True)
        matrix = matrix / matrix.sum(-1, keepdim=True)
    return matrix


class Mhc(Streams):
    """Manifold-constrained hyper-connections (arXiv 2512.24880)."""

    @dataclass(frozen=True)
    class Options:
        num_streams: int = 4
        iterations: int = 20

        def __post_init__(self) -> None:
            check_count("num_streams", self.num_streams)
            check_count("iterations", self.iterations)

    options: Options
    identity_at_init = "up_to_eps"

    def __init__(self, options: Options, decoder: Any) -> None:
        super().__init__(options, decoder)
        self.connections = nn.ModuleList(
            ManifoldConnection(self.width, options.num_streams, site, options.iterations)
            for site in range(self.num_sites - 1)
        )
