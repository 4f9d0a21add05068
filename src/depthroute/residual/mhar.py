"""Multi-head attention residuals: every sublayer reads its own softmax mix of all earlier outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from depthroute.ops.two_phase import Engine, Plan, kernels_for
from depthroute.residual.base import Residual, State, as_source, sublayer_name
from depthroute.residual.options import check_choice, check_count, check_number, route_heads
from depthroute.residual.read import DepthRead


@dataclass(frozen=True)
class ReadOptions:
    """What every scheme that reads over depth can be told.

    num_heads: H, the route heads, or "kv" for the decoder's number of KV heads; 1 is single-head attention residuals.
    scale: temperature of the logits (1 / sqrt(H) at H = 1 is the temperature control of the multi-head form).
    eps: of the key norm.
    backend: of `depthroute.depth_mix`.
    """

    num_heads: int | str = "kv"
    scale: float = 1.0
    eps: float = 1e-6
    backend: str = "auto"

    def __post_init__(self) -> None:
        check_count("num_heads", self.num_heads, also=("kv",))
        check_number("scale", self.scale, above=0.0)
        check_number("eps", self.eps, above=0.0)
        check_choice("backend", self.backend, ("auto", "reference", "triton"))

    def read(self, decoder: Any, kind: type[DepthRead] = DepthRead) -> DepthRead:
        """A fresh read site for this decoder."""
        heads = route_heads(self.num_heads, decoder)
        return kind(decoder.hidden_size, heads, scale=self.scale, eps=self.eps, backend=self.backend)


class Mhar(Residual):
    """Full multi-head attention residuals (arXiv 2607.27230). State: the sources, the embedding first.

    Site j reads sources 0 .. j. Site 0 has one source, so it has no query: `reads[i]` belongs to site i + 1.
    With zero queries a read is the stream divided by its number of sources, which the norm behind it undoes up to
    its eps; `read_scale: sum` multiplies the read by that number, so that a converted model starts as the original.

    The reads of a tile of sites share their work (docs/operator.md); what a tile has under way lies in the state behind
    the sources. `backend: reference` reads site by site with `depth_mix`.
    """

    @dataclass(frozen=True)
    class Options(ReadOptions):
        read_scale: str = "mean"

        def __post_init__(self) -> None:
            super().__post_init__()
            check_choice("read_scale", self.read_scale, ("mean", "sum"))

    options: Options
    identity_at_init = "up_to_eps"

    def __init__(self, options: Options, decoder: Any) -> None:
        super().__init__(options, decoder)
        self.reads = nn.ModuleList(options.read(decoder) for _ in range(1, self.num_sites))
        self.num_heads = route_heads(options.num_heads, decoder)
        self.plan = self.make_plan()

    def make_plan(self) -> Plan:
        """Which sources there are at each site, and which sites read together."""
        return Plan.full(self.num_sites)

    @classmethod
    def check(cls, options: Options, decoder: Any) -> None:
        route_heads(options.num_heads, decoder)

    def start(self, x: Tensor) -> State:
        return (as_source(x),)

    def read(self, state: State, site: int, norm: nn.Module) -> tuple[Tensor, State]:
        if engine := self._engine(state):
            return engine.read(state, site, self.reads, norm, self._factor(site))
        return norm(self._mix(state, site)), state

    def write(self, state: State, y: Tensor, site: int) -> State:
        if engine := self._engine(state):
            return engine.write(state, as_source(y), site)
        if self.plan.appends(site):
            return (*state, as_source(y))
        return (*state[:-1], state[-1] + as_source(y))

    def finish(self, state: State) -> Tensor:
        last = self.num_sites - 1
        if engine := self._engine(state):
            return engine.finish(state, self.reads, self._factor(last))
        return self._mix(state, last)

    def site_read(self, state: State, site: int) -> tuple[DepthRead, State] | None:
        if site == 0:
            return None
        read: DepthRead = self.reads[site - 1]  # type: ignore[assignment]
        return read, state[: self.plan.num_sources(site)]

    def source_names(self, site: int) -> tuple[str, ...]:
        if site == 0:
            return ()
        return ("embedding", *(sublayer_name(written) for written in range(site)))

    def _engine(self, state: State) -> Engine | None:
        """What reads this state in two phases; None where its sources are read site by site."""
        kernels = kernels_for(state[0], self.num_heads, self.options.backend)
        if kernels is None:
            return None
        return Engine(self.plan, self.num_heads, scale=self.options.scale, eps=self.options.eps, kernels=kernels)

    def _mix(self, state: State, site: int) -> Tensor:
        mix = self.reads[site - 1](state) if site else state[0]
        factor = self._factor(site)
        return mix if factor == 1 else mix * factor

    def _factor(self, site: int) -> int:
        return self.plan.num_sources(site) if self.options.read_scale == "sum" else 1
