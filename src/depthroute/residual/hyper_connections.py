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

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Streams (B, T, n, D) -> weights to read (..., n), to mix (..., n, n) and to write (..., n).

        The leading axes are (B, T) in the dynamic form, and none in the static one.
        """
        read: Tensor = self.read_weight
        mix: Tensor = self.mix_weight
        write: Tensor = self.write_weight
        if self.dynamic:
            normed = F.rms_norm(streams, (streams.shape[-1],), self.norm_weight.to(streams.dtype), 1e-6)
            alpha = self.alpha_scale * torch.tanh(normed @ self.dynamic_alpha.to(normed.dtype))
            beta = self.beta_scale * torch.tanh(normed @ self.dynamic_beta.to(normed.dtype))
            read, mix, write = read + alpha[..., 0], mix + alpha[..., 1:], write + beta[..., 0]
        return read, mix, write


class Streams(Residual):
    """n residual streams that every site reads, mixes and writes by weights of its own.

    State: (streams,) with streams (B, T, n, D), copies of the embedding at the start; between a read and its write
    (mixed streams, write weights). The streams keep the stock model's dtype under autocast. finish() is their sum.
    `connections[site]` maps the streams to weights: to read (..., n), to mix (..., n, n) from old to new, to write.
    """

    connections: nn.ModuleList

    def start(self, x: Tensor) -> State:
        return (torch.stack([x] * self.options.num_streams, dim=-2),)

    def read(self, state: State, site: int, norm: nn.Module) -> tuple[Tensor, State]:
        (streams,) = state
        # Autocast would round the streams: weights and mixing are computed in the streams' own dtype.
        with torch.autocast(streams.device.type, enabled=False):
            read, mix, write = (weight.to(streams.dtype) for weight in self.connections[site](streams))
            x = _mix(read.unsqueeze(-1), streams).squeeze(-2)
            mixed = _mix(mix, streams)
        return norm(x), (mixed, write)

    def write(self, state: State, y: Tensor, site: int) -> State:
        streams, weight = state
        return (streams + weight.unsqueeze(-1) * y.unsqueeze(-2),)

    def finish(self, state: State) -> Tensor:
        return state[0].sum(-2)


class HyperConnections(Streams):
    """Hyper-connections, static or dynamic (arXiv 2409.19606)."""

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


def _mix(weights: Tensor, streams: Tensor) -> Tensor:
    """(..., n, m), (B, T, n, D) -> (B, T, m, D): a sum of n products, which a compiler fuses and a GEMM would not."""
    terms = [w.unsqueeze(-1) * s.unsqueeze(-2) for w, s in zip(weights.unbind(-2), streams.unbind(-2), strict=True)]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
