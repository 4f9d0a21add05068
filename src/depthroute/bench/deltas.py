"""Gated reads of block deltas beside a stream, as `delta_mhar` makes them, for `bench route`.

Site j reads stream + gate * mix(null, embedding, deltas of finished blocks). That times a fixed vector is what the site
adds to the stream and to its block's delta; there is no final read. The functions are named as in `chains`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from depthroute.bench.chains import Chain, Shape, Site
from depthroute.ops import reference
from depthroute.ops.two_phase.gated import GatedEngine
from depthroute.ops.two_phase.plan import Plan

ARMS = ("engine", "engine-compiled", "reference")


@dataclass(frozen=True)
class GatedSite(Site):
    """Parameters of one gated read."""

    null_source: Tensor
    gate: Tensor


@dataclass(frozen=True)
class DeltaChain(Chain):
    """One microbatch; `block` sites make a block."""

    reads: tuple[GatedSite, ...]
    block: int


def make_chain(shape: Shape, dtype: torch.dtype, device: str, seed: int = 0, tokens: int | None = None) -> DeltaChain:
    """Random inputs with open gates; the logits of a token are spread by about one. `tokens` replaces the shape's."""
    assert shape.block is not None
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.to(device).requires_grad_()

    count, D = tokens or shape.tokens, shape.width
    spread = (shape.heads / D) ** 0.5
    return DeltaChain(
        x=leaf(normal(count, D).to(dtype)),
        reads=tuple(
            GatedSite(leaf(spread * normal(D)), leaf(1 + 0.2 * normal(D)), leaf(normal(D)), leaf(0.5 + 0.1 * normal(1)))
            for _ in range(shape.sites)
        ),
        # Small ones: over 64 sites the stream then grows by less than ten.
        factors=tuple((0.25 * normal(D)).to(device, dtype) for _ in range(shape.sites)),
        upstream=normal(count, D).to(device, dtype),
        heads=shape.heads,
        block=shape.block,
    )


def with_engine(chain: DeltaChain, *, kernels: bool = True) -> Tensor:
    """In two phases: one inter read serves the sites of a block."""
    engine = GatedEngine(Plan.deltas(len(chain.reads), chain.block), chain.heads, kernels=kernels)
    state = engine.start(chain.x, chain.x)
    added = chain.x
    for site, factor in enumerate(chain.factors):
        x, state = engine.read(state, site, chain.reads)
        y = x * factor
        added = added + y if site % chain.block else y
        state = engine.write(state, state[0] + y, added, site)
    return state[0]


def join(stream: Tensor, factor: Tensor) -> Tensor:
    """What joins two sites: an addition to the stream; the sums of a block are work of the reads."""
    return stream + stream * factor


def with_reference(chain: DeltaChain) -> Tensor:
    """Site after site in plain PyTorch."""
    stream, sources, added = chain.x, [chain.x], chain.x
    for site, (read, factor) in enumerate(zip(chain.reads, chain.factors, strict=True)):
        null = read.null_source.to(stream.dtype).expand_as(stream)
        mix = reference.depth_mix([null, *sources], read.query, num_heads=chain.heads, norm_weight=read.norm_weight)
        assert isinstance(mix, Tensor)
        y = (stream + read.gate.to(stream.dtype) * mix) * factor
        stream = stream + y
        added = added + y if site % chain.block else y
        if (site + 1) % chain.block == 0:
            sources.append(added)
    return stream
