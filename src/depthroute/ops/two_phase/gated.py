"""The gated form of a merge, for schemes that read beside a stream: stream + gate * mix.

Inside a block the shared sources do not change, so one `inter` read serves all its sites. Each site merges its part
with one vector of its own that is the same for every token, and adds the gated mix to the stream.
"""

from typing import Any

import torch
from torch import Tensor

from depthroute.ops.reference import accumulation_dtype
from depthroute.ops.two_phase.engine import check_source
from depthroute.ops.two_phase.plan import Plan
from depthroute.ops.two_phase.register import gated, inter

State = tuple[Tensor, ...]


class GatedEngine:
    """Gated reads beside a stream, of an embedding and the deltas of finished blocks; keeps nothing between calls.

    A state before `site` reads is a flat tuple: the stream, the C finished sources (..., D), the delta so far of the
    block that is open if it has one, the rstd (..., H) of the sources, and, where the tile has made its inter read, of
    this site and those after it in the tile the partial mixes, the log-sum-exps, the null sources (D,) and what
    `logits_and_gates` makes of them.

    Args:
        plan: `Plan.deltas`. num_heads, scale, eps: of every read. kernels: Triton, or plain PyTorch.
    """

    def __init__(self, plan: Plan, num_heads: int, *, scale: float = 1.0, eps: float = 1e-6, kernels: bool) -> None:
        assert plan.block is not None
        self.plan, self.block, self.num_heads = plan, plan.block, num_heads
        self.scale, self.eps, self.kernels = float(scale), float(eps), kernels

    def start(self, stream: Tensor, source: Tensor) -> State:
        return (stream, source, self._rstd(source))

    def read(self, state: State, site: int, reads: Any) -> tuple[Tensor, State]:
        """stream + gate * mix (..., D) of `site`, and the state to give to `write`.

        reads: of all sites, modules with `query`, `norm_weight`, `null_source` (D,) and `gate` (1,).
        """
        first, end = self.plan.tile(site)
        count, before = self._counts(site)
        rstd, ahead = state[before : before + count], state[before + count :]
        if site == first:
            sources, rstd, ahead = self._open_tile(state, rstd, reads[first:end])
            state = (state[0], *sources, *state[1 + count :])
        partial, lse, null, own = (ahead[i : i + end - site] for i in range(0, len(ahead), end - site))
        out = gated(state[0], partial[0], lse[0], null[0], own[0], self.num_heads, self.kernels)
        return out, (*state[:before], *rstd, *partial[1:], *lse[1:], *null[1:], *own[1:])

    def _open_tile(self, state: State, rstd: State, reads: Any) -> tuple[State, State, State]:
        """Make the inter read of a tile -> the sources and their rstd for later readers, and what its sites need."""
        sources = state[1 : 1 + len(rstd)]
        dtype = accumulation_dtype(sources[0].dtype)
        query, norm_weight, null, gate = (
            torch.stack([getattr(read, name) for read in reads])
            for name in ("query", "norm_weight", "null_source", "gate")
        )
        weight = self.scale * query.to(dtype) * norm_weight.to(dtype)
        null = null.to(sources[0].dtype)  # a source like the others: rounded as they are
        own = logits_and_gates(gate.to(state[0].dtype), null, weight, self.num_heads, self.eps)
        # No norm stands behind such a read, so the rounding of a mix would show in a query's gradient.
        partials, lses, sources, rstd = inter(sources, rstd, weight, self.num_heads, self.kernels, exact=True)
        return sources, rstd, (*partials, *lses, *null.unbind(0), *own.unbind(0))

    def write(self, state: State, stream: Tensor, added: Tensor, site: int) -> State:
        """Record the new stream, and what the block of `site` has added so far: a source if that completes it."""
        count, before = self._counts(site)
        sources, rest = state[1 : 1 + count], state[before:]
        if (site + 1) % self.block:
            return (stream, *sources, added, *rest)
        check_source(added, sources[0], site)
        return (stream, *sources, added, *rest[:count], self._rstd(added), *rest[count:])

    def _counts(self, site: int) -> tuple[int, int]:
        """How many sources are finished, and how many tensors come before their rstd."""
        count = 1 + site // self.block
        return count, 1 + count + (site % self.block != 0)

    def _rstd(self, source: Tensor) -> Tensor:
        mean_square = source.to(accumulation_dtype(source.dtype)).square().mean(-1, keepdim=True)
        return torch.rsqrt(mean_square + self.eps).expand(*source.shape[:-1], self.num_heads).contiguous()


def gated_merge(
    stream: Tensor,
    gate: Tensor,
    partial: Tensor,
    lse_in: Tensor,
    null: Tensor,
    weight: Tensor,
    num_heads: int,
    eps: float,
    *,
    kernels: bool,
) -> Tensor:
    """stream + gate * mix (..., D), where mix merges one site's part of an `inter` read with a null source.

    stream: (..., D), of a dtype of its own. gate: (1,). partial, lse_in: what an `exact` inter read gave for this site.
    null: (D,), the null source, which takes the place of a row in every token. weight: (D,), that of the site.
    The gradients of gate, null and weight are sums over tokens.
    """
    null = null.to(partial.dtype)
    gates = gate.to(stream.dtype).unsqueeze(0)
    own = logits_and_gates(gates, null.unsqueeze(0), weight.unsqueeze(0), num_heads, eps)
    return gated(stream, partial, lse_in, null, own[0], num_heads, kernels)


def logits_and_gates(gate: Tensor, null: Tensor, weight: Tensor, num_heads: int, eps: float) -> Tensor:
    """For each of S sites the logits (H,) of its null source, then its gate, padded to four numbers or a multiple.

    gate: (S, 1) and null: (S, D), both as rounded. weight: (S, D). So each row begins where a vector load may, and many
    sites take as many small kernels as one.
    """
    dtype = accumulation_dtype(null.dtype)
    rows = null.to(dtype)
    rstd = torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    logits = rstd * (rows * weight.to(dtype)).unflatten(-1, (num_heads, -1)).sum(-1)
    return torch.nn.functional.pad(torch.cat([logits, gate.to(dtype)], -1), (0, -(num_heads + 1) % 4))
