"""Hyper-connections: n residual streams with learned read, mixing and write weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthroute.residual.base import Residual, State
from depthroute.residual.initialization import one_hot_
from depthroute.residual.options import check_count, check_flag


class HyperConnection(nn.Module):
    """The weights of one site: A_m (how it reads the streams), A_r (how they mix), B (how it writes to them).

    Starts as the plain residual connection: it reads stream `site mod n`, mixes nothing, writes to every stream
    with weight 1 (arXiv 2409.19606, section 2.3). The dynamic form adds s * tanh(norm(streams) W), with W = 0 and
    s = 0.01 at the start, to each of the three (equations 9 to 12 there).
    """

    def __init__(self, width: int, num_streams: int, site: int, dynamic: bool) -> None:
        super().__init__()
        self.first_stream = site % num_streams
        self.read_weight = nn.Parameter(torch.empty(num_streams))
        self.mix_weight = nn.Parameter(torch.empty(num_streams, num_streams))
        self.write_weight = nn.Parameter(torch.empty(num_streams))
        self.dynamic = dynamic
        if dynamic:
            self.norm_weight = nn.Parameter(torch.empty(width))
            self.dynamic_alpha = nn.Parameter(torch.empty(width, num_streams + 1))
            self.dynamic_beta = nn.Parameter(torch.empty(width, 1))
            self.alpha_scale = nn.Parameter(torch.empty(1))
            self.beta_scale = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        one_hot_(self.read_weight, self.first_stream)
        nn.init.eye_(self.mix_weight)
        nn.init.ones_(self.write_weight)
        if self.dynamic:
            nn.init.ones_(self.norm_weight)
            nn.init.zeros_(self.dynamic_alpha)
            nn.init.zeros_(self.dynamic_beta)
            nn.init.constant_(self.alpha_scale, 0.01)
            nn.init.constant_(self.beta_scale, 0.01)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """Streams (B, T, n, D) -> alpha (..., n, 1 + n): A_m and A_r side by side, and beta (..., n, 1).

        Static weights have no leading axes, dynamic ones have (B, T).
        """
        alpha = torch.cat([self.read_weight[:, None], self.mix_weight], dim=1)
        beta = self.write_weight[:, None]
        if self.dynamic:
            normed = F.rms_norm(streams, (streams.shape[-1],), self.norm_weight.to(streams.dtype), 1e-6)
            alpha = alpha + self.alpha_scale * torch.tanh(normed @ self.dynamic_alpha.to(normed.dtype))
            beta = beta + self.beta_scale * torch.tanh(normed @ self.dynamic_beta.to(normed.dtype))
        return alpha, beta


class HyperConnections(Residual):
    """Hyper-connections, static or dynamic (arXiv 2409.19606).

    State: (streams,) with streams (B, T, n, D), copies of the embedding at the start; between a read and its write
    (mixed streams, beta). The streams keep the stock model's dtype under autocast. finish() is their sum.
    """

    @dataclass(frozen=True)
    class Options:
        num_streams: int = 4
        dynamic: bool = True

        def __post_init__(self) -> None:
            check_count("num_streams", self.num_streams)
            check_flag("dynamic", self.dynamic)

    options: Options
    identity_at_init = "up_to_eps"

    def __init__(self, options: Options, decoder: Any) -> None:
        super().__init__(options, decoder)
        self.connections = nn.ModuleList(
            HyperConnection(self.width, options.num_streams, site, options.dynamic)
            for site in range(self.num_sites - 1)
        )

    def start(self, x: Tensor) -> State:
        return (torch.stack([x] * self.options.num_streams, dim=-2),)

    def read(self, state: State, site: int, norm: nn.Module) -> tuple[Tensor, State]:
        (streams,) = state
        # Autocast would round the streams: weights and mixing are computed in the streams' own dtype.
        with torch.autocast(streams.device.type, enabled=False):
            alpha, beta = self.connections[site](streams)
            mixed = mix_streams(alpha.to(streams.dtype), streams)
        return norm(mixed[..., 0, :]), (mixed[..., 1:, :], beta.to(streams.dtype))

    def write(self, state: State, y: Tensor, site: int) -> State:
        streams, beta = state
        return (streams + beta * y.unsqueeze(-2),)

    def finish(self, state: State) -> Tensor:
        return state[0].sum(-2)


def mix_streams(weights: Tensor, streams: Tensor) -> Tensor:
    """(..., n, m), (B, T, n, D) -> (B, T, m, D): a sum of n products, which a compiler fuses and a GEMM would not."""
    terms = [w.unsqueeze(-1) * s.unsqueeze(-2) for w, s in zip(weights.unbind(-2), streams.unbind(-2), strict=True)]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
