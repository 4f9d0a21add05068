"""A chain of sites read in two phases. The state is a flat tuple of tensors, never changed in place.

A state before `site` reads holds, in this order,

    sources      num_sources(site)       (..., D)   the newest last
    rstd         num_sources(site) - 1   (..., H)   of all sources but the newest
    partial mixes and log-sum-exps       (..., D), (..., H)   of this site and those after it in its tile, where the
                                                    tile has an inter read and has made it
    weights                              (P, D)     of the same sites, P equal copies (`register.spread`)

so state[:num_sources(site)] are its sources, and every function takes and gives plain tuples: layers may pass them
through checkpointing, reentrant too, and FSDP.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from depthroute.ops.reference import accumulation_dtype
from depthroute.ops.two_phase.plan import Plan
from depthroute.ops.two_phase.register import inter, merge, spread

State = tuple[Tensor, ...]

RMS_NORMS = ("Qwen3RMSNorm", "Qwen2RMSNorm", "LlamaRMSNorm", "MistralRMSNorm")


class _Open(NamedTuple):
    """A state taken apart."""

    sources: State
    rstd: State
    partials: State
    lses: State
    weights: State


class Engine:
    """Reads of a chain in two phases; holds no tensor and keeps nothing between calls.

    Args:
        plan: the sites and their tiles.
        num_heads, scale, eps: of every read.
        kernels: Triton, or plain PyTorch.
    """

    def __init__(self, plan: Plan, num_heads: int, *, scale: float = 1.0, eps: float = 1e-6, kernels: bool) -> None:
        self.plan = plan
        self.num_heads = num_heads
        self.scale = float(scale)
        self.eps = float(eps)  # an int would be a constant of the kernels
        self.kernels = kernels

    def start(self, x: Tensor) -> State:
        """The first source (..., D) -> the state before site 0."""
        return (x,)

    def write(self, state: State, y: Tensor, site: int) -> State:
        """Record the output of `site` in the state that its read gave -> the state before the next site."""
        count = self.plan.num_sources(site)
        sources, rest = state[:count], state[count:]
        if self.plan.appends(site):
            check_source(y, sources[0], site)
            return (*sources, y, *rest)
        newest = sources[-1] + y
        check_source(newest, sources[0], site)
        # The newest source changes, so its rstd, which the read appended, is no longer its own.
        return (*sources[:-1], newest, *rest[: count - 1], *rest[count:])

    def read(
        self,
        state: State,
        site: int,
        reads: Any,
        norm: nn.Module | None = None,
        factor: float = 1.0,
    ) -> tuple[Tensor, State]:
        """What `site` reads (..., D), and the state to give to `write`.

        reads: the parameters of the sites from 1 on, modules with `query` and `norm_weight` (D,). Site 0 has one
            source, which is what it reads.
        norm: a module to apply to the mix; an RMSNorm is fused where `fusable_eps` knows it.
        factor: on the mix, before the norm.
        """
        open_ = self._unpack(state, site)
        if site == self.plan.tile(site)[0]:
            open_ = self._open_tile(open_, site, reads)
        first = self.plan.num_finished(site)
        partial, lse = (open_.partials[0], open_.lses[0]) if open_.partials else (None, None)
        norm_eps = None if norm is None else fusable_eps(norm, open_.sources[0])
        merged = merge(
            partial,
            lse,
            open_.sources[first:],
            open_.rstd[first:],
            open_.weights[0],
            self.num_heads,
            self.eps,
            norm_weight=None if norm_eps is None else norm.weight,  # type: ignore[union-attr,arg-type]
            norm_eps=(norm_eps or 0.0) / factor**2,  # the norm of a multiple is that of the mix with another eps
            kernels=self.kernels,
        )
        out = merged.out
        if norm_eps is None:
            out = out if factor == 1 else out * factor
            out = out if norm is None else norm(out)
        state = (
            *open_.sources[:first],
            *merged.sources,
            *open_.rstd[:first],
            *merged.rstd,
            *open_.partials[1:],
            *open_.lses[1:],
            *open_.weights[1:],
        )
        return out, state

    def finish(self, state: State, reads: Any, factor: float = 1.0) -> Tensor:
        """What the last site reads (..., D)."""
        return self.read(state, self.plan.num_sites - 1, reads, factor=factor)[0]

    def _unpack(self, state: State, site: int) -> _Open:
        count = self.plan.num_sources(site)
        start, end = self.plan.tile(site)
        sources, rstd, rest = state[:count], state[count : 2 * count - 1], state[2 * count - 1 :]
        if site == start:
            return _Open(sources, rstd, (), (), ())
        ahead = end - site
        if not self.plan.num_finished(site):
            return _Open(sources, rstd, (), (), rest)
        return _Open(sources, rstd, rest[:ahead], rest[ahead : 2 * ahead], rest[2 * ahead :])

    def _open_tile(self, open_: _Open, site: int, reads: Any) -> _Open:
        """Make the inter read of a tile whose first site is `site`."""
        _, end = self.plan.tile(site)
        source = open_.sources[0]
        weight, rows = spread(self._weight(site, end, reads, source), source, self.num_heads, self.kernels)
        finished = self.plan.num_finished(site)
        if not finished:
            return open_._replace(weights=rows)
        partials, lses, sources, rstd = inter(
            open_.sources[:finished], open_.rstd[:finished], weight, self.num_heads, self.kernels
        )
        return _Open((*sources, *open_.sources[finished:]), (*rstd, *open_.rstd[finished:]), partials, lses, rows)

    def _weight(self, start: int, end: int, reads: Any, source: Tensor) -> Tensor:
        """scale * query * norm_weight (S, D) of the sites `start` .. `end` - 1; zero for site 0."""
        dtype = accumulation_dtype(source.dtype)
        sites = [reads[site - 1] for site in range(max(start, 1), end)]
        zero = [source.new_zeros(source.shape[-1], dtype=dtype)] if start == 0 else []
        if not sites:
            return torch.stack(zero)
        query = torch.stack([read.query for read in sites]).to(dtype)
        weight = self.scale * query * torch.stack([read.norm_weight for read in sites]).to(dtype)
        return torch.cat([zero[0].unsqueeze(0), weight]) if zero else weight


def kernels_for(source: Tensor, num_heads: int, backend: str) -> bool | None:
    """How to read a chain of such sources: in two phases with kernels (True) or without (False), or one by one (None).

    `backend` is that of `depth_mix`. "reference" reads one by one, and so do rows too wide for the kernels of the two
    phases, since those of `depth_mix` have no such limit. RuntimeError where "triton" cannot run at all.
    """
    from depthroute import ops

    if backend == "reference":
        return None
    obstacle = ops._triton_obstacle(source, return_weights=False)
    if backend == "triton" and obstacle:
        raise RuntimeError(f"backend 'triton' cannot run here: {obstacle}")
    # No tokens are no work for a kernel.
    if obstacle or not source.numel() or (backend == "auto" and not source.is_cuda):
        return False
    from depthroute.ops.kernels.two_phase import obstacle as shape_obstacle

    return True if shape_obstacle(num_heads, source.shape[-1] // num_heads, source.dtype.itemsize) is None else None


def check_source(source: Tensor, first: Tensor, site: int) -> None:
    """Refuse what `site` wrote where it is unlike the sources before it: kernels take all rows for rows of the first.

    As `depth_mix` does. Sublayers outside of autocast in a model under autocast write such a source.
    """
    wrote = f"residual: site {site} wrote a source of"
    if source.dtype != first.dtype:
        raise TypeError(f"{wrote} {source.dtype}, but it must be {first.dtype} like the sources before it")
    if source.shape != first.shape or source.device != first.device:
        raise ValueError(
            f"{wrote} shape {tuple(source.shape)} on {source.device}, but it must have {tuple(first.shape)} on "
            f"{first.device} like the sources before it"
        )


def fusable_eps(norm: nn.Module, source: Tensor) -> float | None:
    """The eps of a norm module that `merge` can apply itself to a mix of such sources; None for any other.

    That is the RMSNorm of transformers' decoders: a weight and `variance_epsilon`, computed in fp32, and nobody who
    watches the module by a hook or has put another `forward` on it (accelerate does, to fetch an offloaded weight).
    Without autocast, a weight of another dtype would change that of the result.
    """
    if type(norm).__name__ not in RMS_NORMS or source.dtype == torch.float64 or "forward" in vars(norm):
        return None
    if norm._forward_hooks or norm._forward_pre_hooks or norm._backward_hooks or norm._backward_pre_hooks:
        return None
    if norm.weight.dtype != source.dtype and not torch.is_autocast_enabled(source.device.type):
        return None
    return float(norm.variance_epsilon)  # type: ignore[arg-type]
