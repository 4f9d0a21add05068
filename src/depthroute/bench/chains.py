"""The workload of `bench route`: all depth reads of one microbatch, as a chain of sites joined by a cheap map.

Site j reads the j + 1 sources so far, and its mix times a fixed vector is the next source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from depthroute.ops import depth_mix, reference
from depthroute.ops.two_phase.engine import Engine
from depthroute.ops.two_phase.plan import Plan


@dataclass(frozen=True)
class Shape:
    """N sites, tokens of one microbatch, width D and route heads H.

    block: sites of a block where the reads are those of `deltas`; None for the chain of this module.
    """

    sites: int
    tokens: int
    width: int
    heads: int
    block: int | None = None


SHAPES = {
    "100m": Shape(25, 4096, 512, 4),
    "350m": Shape(49, 1024, 1024, 8),
    "1b": Shape(73, 1024, 1280, 8),
    "100m-h1": Shape(25, 4096, 512, 1),
    "350m-h1": Shape(49, 1024, 1024, 1),
    "1b-h1": Shape(73, 1024, 1280, 1),
    "100m-x4": Shape(25, 16384, 512, 4),
    "350m-x4": Shape(49, 4096, 1024, 8),
    "1b-x4": Shape(73, 4096, 1280, 8),
    "8b-delta": Shape(64, 8192, 4096, 8, block=8),
}


@dataclass(frozen=True)
class Site:
    """Parameters of one read."""

    query: Tensor
    norm_weight: Tensor


@dataclass(frozen=True)
class Chain:
    """One microbatch: its inputs, which are leaves, and the gradient of its output."""

    x: Tensor
    reads: tuple[Site, ...]
    factors: tuple[Tensor, ...]
    upstream: Tensor
    heads: int

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return (self.x, *(tensor for read in self.reads for tensor in vars(read).values()))

    def double(self) -> Self:
        """The same numbers in fp64."""

        def leaf(tensor: Tensor) -> Tensor:
            return tensor.detach().double().requires_grad_()

        return replace(
            self,
            x=leaf(self.x),
            reads=tuple(type(read)(*map(leaf, vars(read).values())) for read in self.reads),
            factors=tuple(factor.double() for factor in self.factors),
            upstream=self.upstream.double(),
        )

    def step(self, run: Callable[[Self], Tensor]) -> tuple[Tensor, ...]:
        """The output of a way to run the chain, and the gradient of every leaf."""
        out = run(self)
        return (out.detach(), *torch.autograd.grad(out, self.leaves, self.upstream, allow_unused=True))


def make_chain(shape: Shape, dtype: torch.dtype, device: str, seed: int = 0, tokens: int | None = None) -> Chain:
    """Random inputs; the logits of a token are spread by about one. `tokens` replaces the shape's."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    count, D = tokens or shape.tokens, shape.width
    spread = (shape.heads / D) ** 0.5
    return Chain(
        x=normal(count, D).to(device, dtype).requires_grad_(),
        reads=tuple(
            Site((spread * normal(D)).to(device).requires_grad_(), (1 + 0.2 * normal(D)).to(device).requires_grad_())
            for _ in range(shape.sites - 1)
        ),
        factors=tuple((2 * normal(D)).to(device, dtype) for _ in range(shape.sites - 1)),
        upstream=normal(count, D).to(device, dtype),
        heads=shape.heads,
    )


def with_engine(chain: Chain, *, kernels: bool = True, plan: Plan | None = None) -> Tensor:
    """In two phases."""
    engine = Engine(plan or Plan.full(len(chain.reads) + 1), chain.heads, kernels=kernels)
    state = engine.start(chain.x)
    for site, factor in enumerate(chain.factors):
        mix, state = engine.read(state, site, chain.reads)
        state = engine.write(state, mix * factor, site)
    return engine.finish(state, chain.reads)


def join(x: Tensor, factor: Tensor) -> Tensor:
    """What joins two sites."""
    return x * factor


def with_map_alone(chain: Chain, join: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """What joins the sites, and nothing else. A compiled `join` is still one for each site, as between reads."""
    x = chain.x
    for factor in chain.factors:
        x = join(x, factor)
    return x


def with_reads(chain: Chain, read: Callable[[Sequence[Tensor], Site, int], Tensor]) -> Tensor:
    """Site after site, each with one read of all its sources."""
    sources = [chain.x]
    for site, factor in enumerate(chain.factors):
        mix = sources[0] if site == 0 else read(sources, chain.reads[site - 1], chain.heads)
        sources.append(mix * factor)
    return read(sources, chain.reads[-1], chain.heads)


def with_reference(chain: Chain) -> Tensor:
    """Site after site in plain PyTorch."""
    return with_reads(chain, reference_read)


def reference_read(sources: Sequence[Tensor], site: Site, heads: int) -> Tensor:
    mix = reference.depth_mix(sources, site.query, num_heads=heads, norm_weight=site.norm_weight)
    assert isinstance(mix, Tensor)
    return mix


def fused_read(sources: Sequence[Tensor], site: Site, heads: int) -> Tensor:
    mix = depth_mix(sources, site.query, num_heads=heads, norm_weight=site.norm_weight, backend="triton")
    assert isinstance(mix, Tensor)
    return mix


def stacked_read(values: Tensor, query: Tensor, norm_weight: Tensor, heads: int) -> Tensor:
    """The read as it is often written for torch.compile: one stacked tensor (N, tokens, D), two contractions."""
    rows = values.float()
    keys = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-6)
    weight = (query * norm_weight).float().unflatten(-1, (heads, -1))
    weights = torch.einsum("hk,nthk->nth", weight, keys.unflatten(-1, (heads, -1))).softmax(0)
    return torch.einsum("nth,nthk->thk", weights, rows.unflatten(-1, (heads, -1))).flatten(-2).to(values.dtype)


def engine_rows(plan: Plan) -> int:
    """Rows of D values that the engine's kernels read and write, forward and backward, for each token.

    A merge with M sources: forward M, its partial mix, and the mix written; backward the gradient, the partial mix, M
    sources (again from cache), M - 1 sums so far (of the newest too where a later site reads it), M + 1 written. An
    inter read of N sources for S sites: forward N + S; backward N + S, N sums so far where there are any, N written.
    """
    rows = 0
    last = plan.num_sites - 1
    for site in range(plan.num_sites):
        start, end = plan.tile(site)
        finished = plan.num_finished(site)
        merged = plan.num_sources(site) - finished
        has_inter = int(finished > 0)
        read_later = merged if site + 1 < end or end <= last else 0
        rows += merged + has_inter + 1
        rows += 1 + has_inter + merged + read_later + merged + has_inter
        if site == start and finished:
            sums = finished if end <= last else 0
            rows += finished + (end - start) + finished + (end - start) + sums + finished
    return rows
