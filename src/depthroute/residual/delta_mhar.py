"""Delta attention residuals: a gated read of block deltas beside the stream, to graft onto a pretrained model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from depthroute.ops.two_phase import GatedEngine, Plan, kernels_for
from depthroute.residual.base import Residual, State, as_source
from depthroute.residual.mhar import ReadOptions
from depthroute.residual.options import check_count, route_heads
from depthroute.residual.read import DepthRead


class GatedRead(DepthRead):
    """A read with a null source of its own, a learnable vector that stands for "read nothing", and a gate.

    Both start at zero: a closed gate leaves the stream as it is, and opens by its own gradient.
    """

    def __init__(self, width: int, num_heads: int, **options: Any) -> None:
        super().__init__(width, num_heads, **options)
        self.null_source = nn.Parameter(torch.empty(width))
        self.gate = nn.Parameter(torch.empty(1))  # not 0-dim: FSDP refuses scalars
        self.reset_gate()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if "gate" in self._parameters:  # the first call comes from the constructor of the base
            self.reset_gate()

    def reset_gate(self) -> None:
        nn.init.zeros_(self.null_source)
        nn.init.zeros_(self.gate)

    def with_null(self, sources: State) -> State:
        """The sources with the null source, the same for every token, before them."""
        return (self.null_source.to(sources[0].dtype).expand_as(sources[0]), *sources)


class DeltaMhar(Residual):
    """Delta attention residuals with route heads (arXiv 2605.18855, 2607.27230).

    State: (stream, embedding, delta of block 0, delta of block 1, ...), where the last entry is the delta so far of
    the block that is open. A sublayer reads stream + gate * mix(null, embedding, finished deltas) and adds to the
    stream; there is no final read. A block is `block_layers` layers, and its delta is what its sublayers added: the
    stream at its end minus the stream at its start, without the cancellation. So the entries after the stream sum
    to the stream at every layer. The stream keeps the stock model's dtype.

    The reads of a block share their work (docs/operator.md); what it has under way lies in the state behind these.
    `backend: reference` reads site by site with `depth_mix`.
    """

    @dataclass(frozen=True)
    class Options(ReadOptions):
        block_layers: int = 4

        def __post_init__(self) -> None:
            super().__post_init__()
            check_count("block_layers", self.block_layers)

    options: Options
    identity_at_init = "exact"

    def __init__(self, options: Options, decoder: Any) -> None:
        super().__init__(options, decoder)
        self.reads = nn.ModuleList(options.read(decoder, GatedRead) for _ in range(self.num_sites - 1))
        self.num_heads = route_heads(options.num_heads, decoder)
        self.plan = Plan.deltas(self.num_sites - 1, self._block_sites)

    @classmethod
    def check(cls, options: Options, decoder: Any) -> None:
        route_heads(options.num_heads, decoder)

    def start(self, x: Tensor) -> State:
        # The source is a view, a node of its own in the graph: gradients then sum in the same order with and without
        # reentrant checkpointing, which takes stream and source as two inputs.
        source = as_source(x).view_as(x)
        engine = self._engine(source)
        return (x, source) if engine is None else engine.start(x, source)

    def read(self, state: State, site: int, norm: nn.Module) -> tuple[Tensor, State]:
        if engine := self._engine(state[1]):
            x, state = engine.read(state, site, self.reads)
            return norm(x), state
        stream = state[0]
        read: GatedRead = self.reads[site]  # type: ignore[assignment]
        mix = read(read.with_null(self._finished(state, site)))
        return norm(stream + read.gate.to(stream.dtype) * mix.to(stream.dtype)), state

    def write(self, state: State, y: Tensor, site: int) -> State:
        stream, sources, added = state[0] + y, self._finished(state, site), y.to(state[0].dtype)
        if site % self._block_sites:
            added = state[1 + len(sources)] + added
        if (site + 1) % self._block_sites == 0:
            added = as_source(added)
        engine = self._engine(state[1])
        return (stream, *sources, added) if engine is None else engine.write(state, stream, added, site)

    def finish(self, state: State) -> Tensor:
        return state[0]

    def site_read(self, state: State, site: int) -> tuple[DepthRead, State] | None:
        if site == self.num_sites - 1:
            return None
        read: GatedRead = self.reads[site]  # type: ignore[assignment]
        return read, read.with_null(self._finished(state, site))

    def source_names(self, site: int) -> tuple[str, ...]:
        if site == self.num_sites - 1:
            return ()
        return ("null", "embedding", *(f"block {block}" for block in range(site // self._block_sites)))

    @property
    def _block_sites(self) -> int:
        return 2 * self.options.block_layers

    def _finished(self, state: State, site: int) -> State:
        """The embedding and the deltas of the finished blocks."""
        return state[1 : 2 + site // self._block_sites]

    def _engine(self, source: Tensor) -> GatedEngine | None:
        """What reads such sources in two phases; None where they are read site by site."""
        kernels = kernels_for(source, self.num_heads, self.options.backend)
        if kernels is None:
            return None
        return GatedEngine(self.plan, self.num_heads, scale=self.options.scale, eps=self.options.eps, kernels=kernels)
