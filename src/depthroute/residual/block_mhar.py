"""Block attention residuals: the sources are sums over blocks of layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from depthroute.residual.base import Residual, State, as_source
from depthroute.residual.mhar import ReadOptions
from depthroute.residual.options import check_count, route_heads
from depthroute.residual.read import DepthRead


class BlockMhar(Residual):
    """Multi-head attention residuals over block sums (the block form of arXiv 2603.15031, read by H heads).

    State: (embedding, sum of block 0, sum of block 1, ...). The last entry is the partial sum of the block that is
    open; closing a block changes nothing but that the next write opens a new entry. Every site reads the whole
    state. A block is `block_layers` Transformer layers; the last one may be shorter.
    """

    @dataclass(frozen=True)
    class Options(ReadOptions):
        block_layers: int = 4

        def __post_init__(self) -> None:
            super().__post_init__()
            check_count("block_layers", self.block_layers)

    identity_at_init = "up_to_eps"

    def __init__(self, options: Options, decoder: Any) -> None:
        super().__init__(options, decoder)
        self.reads = nn.ModuleList(options.read(decoder) for _ in range(1, self.num_sites))

    @classmethod
    def check(cls, options: Options, decoder: Any) -> None:
        route_heads(options.num_heads, decoder)

    def start(self, x: Tensor) -> State:
        return (as_source(x),)

    def read(self, state: State, site: int, norm: nn.Module) -> tuple[Tensor, State]:
        return norm(self._mix(state, site)), state

    def write(self, state: State, y: Tensor, site: int) -> State:
        if self._opens_block(site):
            return (*state, as_source(y))
        return (*state[:-1], state[-1] + as_source(y))

    def finish(self, state: State) -> Tensor:
        return self._mix(state, self.num_sites - 1)

    def site_read(self, state: State, site: int) -> tuple[DepthRead, State] | None:
        if site == 0:
            return None
        read: DepthRead = self.reads[site - 1]  # type: ignore[assignment]
        return read, state

    def source_names(self, site: int) -> tuple[str, ...]:
        if site == 0:
            return ()
        written = site - 1
        blocks = [f"block {block}" for block in range(written // self._block_sites + 1)]
        if not self._opens_block(site) and site != self.num_sites - 1:
            blocks[-1] = "partial"
        return ("embedding", *blocks)

    @property
    def _block_sites(self) -> int:
        return 2 * self.options.block_layers

    def _opens_block(self, site: int) -> bool:
        return site % self._block_sites == 0

    def _mix(self, state: State, site: int) -> Tensor:
        return state[0] if site == 0 else self.reads[site - 1](state)
