"""Block attention residuals: the sources are sums over blocks of layers."""

from __future__ import annotations

from dataclasses import dataclass

from depthroute.ops.two_phase import Plan
from depthroute.residual.mhar import Mhar
from depthroute.residual.options import check_count


class BlockMhar(Mhar):
    """Multi-head attention residuals over block sums (the block form of arXiv 2603.15031, read by H heads).

    State: (embedding, sum of block 0, sum of block 1, ...). The last entry is the partial sum of the block that is
    open; closing a block changes nothing but that the next write opens a new entry. Every site reads the whole
    state. A block is `block_layers` Transformer layers; the last one may be shorter.
    """

    @dataclass(frozen=True)
    class Options(Mhar.Options):
        block_layers: int = 4

        def __post_init__(self) -> None:
            super().__post_init__()
            check_count("block_layers", self.block_layers)

    options: Options

    def make_plan(self) -> Plan:
        return Plan.blocks(self.num_sites, self._block_sites)

    def source_names(self, site: int) -> tuple[str, ...]:
        if site == 0:
            return ()
        blocks = [f"block {block}" for block in range((site - 1) // self._block_sites + 1)]
        if not self.plan.appends(site) and site != self.num_sites - 1:
            blocks[-1] = "partial"
        return ("embedding", *blocks)

    @property
    def _block_sites(self) -> int:
        return 2 * self.options.block_layers
