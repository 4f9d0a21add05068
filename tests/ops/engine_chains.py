"""Small chains of sites for the tests of the engine: the same module run in two phases, or read by read."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from depthroute.ops import reference
from depthroute.ops.two_phase.engine import Engine
from depthroute.ops.two_phase.plan import Plan


class Read(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        # Logits of about one: with sharper ones a long chain is chaotic, and every error in it is noise.
        self.query = nn.Parameter(torch.randn(width) * (heads / width) ** 0.5)
        self.norm_weight = nn.Parameter(1 + 0.2 * torch.randn(width))


class Qwen3RMSNorm(nn.Module):
    """The semantics of transformers' class of that name, by which the engine knows that it may fuse it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.2 * torch.randn(width))
        self.variance_epsilon = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        rows = x.to(torch.promote_types(x.dtype, torch.float32))  # fp64 stays what it is
        rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * rows.to(x.dtype)


class Chain(nn.Module):
    """N sites; sublayer j maps what site j reads to the next source, or to an addend of the newest one.

    mode: "reference" reads site by site, "plain" and "kernels" run the engine. checkpointed: None, or use_reentrant of
    a checkpoint around every two sites.
    """

    def __init__(self, sites, width, heads, *, plan=None, block=None, norm=False, mode="plain", checkpointed=None):
        super().__init__()
        plan = plan or (Plan.full(sites) if block is None else Plan.blocks(sites, block))
        self.plan, self.heads, self.mode, self.checkpointed = plan, heads, mode, checkpointed
        self.engine = Engine(plan, heads, scale=0.7, eps=1e-5, kernels=mode == "kernels")
        self.reads = nn.ModuleList(Read(width, heads) for _ in range(sites - 1))
        self.norms = nn.ModuleList(Qwen3RMSNorm(width) if norm else nn.Identity() for _ in range(sites - 1))

    @staticmethod
    def sublayer(x: Tensor, site: int) -> Tensor:
        return torch.sin(1.3 * x + 0.1 * site) + 0.5 * x

    def forward(self, x: Tensor, tap: list[Tensor] | None = None) -> Tensor:
        """tap collects every source that a sublayer wrote."""
        if self.mode == "reference":
            return self.reference(x, tap)
        state = self.engine.start(x)
        for first in range(0, self.plan.num_sites - 1, 2):
            if self.checkpointed is None:
                state = self.layer(first, *state, tap=tap)
            else:
                state = checkpoint(self.layer, first, *state, use_reentrant=self.checkpointed)
        return self.engine.finish(state, self.reads)

    def layer(self, first: int, *state: Tensor, tap: list[Tensor] | None = None) -> tuple[Tensor, ...]:
        for site in range(first, min(first + 2, self.plan.num_sites - 1)):
            mix, state = self.engine.read(state, site, self.reads, self.norms[site])
            y = self.sublayer(mix, site)
            if tap is not None:
                tap.append(y)
            state = self.engine.write(state, y, site)
        return state

    def reference(self, x: Tensor, tap: list[Tensor] | None = None) -> Tensor:
        sources = [x]
        for site in range(self.plan.num_sites):
            mix = sources[0]
            if site:
                read = self.reads[site - 1]
                mix = reference.depth_mix(
                    sources, read.query, num_heads=self.heads, norm_weight=read.norm_weight, eps=1e-5, scale=0.7
                )
            if site == self.plan.num_sites - 1:
                return mix
            y = self.sublayer(self.norms[site](mix), site)
            if tap is not None:
                tap.append(y)
            sources = [*sources, y] if self.plan.appends(site) else [*sources[:-1], sources[-1] + y]
        raise AssertionError


def make(sites, width=12, heads=2, seed=0, dtype=torch.float64, device="cpu", **options) -> Chain:
    torch.manual_seed(seed)
    return Chain(sites, width, heads, **options).to(device, dtype)


def inputs(width=12, dtype=torch.float64, device="cpu", shape=(2, 3), seed=1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, upstream = torch.randn(2, *shape, width, generator=generator).to(device, dtype)
    return x.requires_grad_(), upstream


def gradients(loss: Tensor, chain: Chain, x: Tensor, **options) -> list[Tensor | None]:
    return list(torch.autograd.grad(loss, [x, *chain.parameters()], allow_unused=True, **options))


def results(chain: Chain, x: Tensor, upstream: Tensor) -> list[Tensor | None]:
    """The output, then the gradient of the input and of every parameter."""
    out = chain(x)
    return [out.detach(), *gradients((out * upstream).sum(), chain, x)]


def error(actual: list[Tensor | None], expected: list[Tensor | None]) -> float:
    """The largest relative error in the 2-norm; a gradient that is absent counts as zero."""
    worst = 0.0
    for a, b in zip(actual, expected, strict=True):
        if a is None and b is None:
            continue
        a = torch.zeros_like(b) if a is None else a
        b = torch.zeros_like(a) if b is None else b
        a, b = a.detach().double(), b.detach().double()
        difference, scale = float((a - b).norm()), float(b.norm())
        part = difference / scale if scale else difference
        worst = max(worst, part if part == part else float("inf"))
    return worst
