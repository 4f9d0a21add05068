"""Which sites read together: the tiles of a chain."""

from __future__ import annotations

import math
from dataclasses import dataclass

# A tile of S sites moves about 2 S^2 rows in its merges and, behind N finished sources, 4 N in its inter read: of N
# sites in all the sum is least near S = sqrt(N) and flat around it. Kernels work on 8 sites or 16: a tile has no more.
NARROW, WIDE = 8, 16
MANY_SITES = 100  # from here on 16 rows, some of them empty, cost less than twice as many tiles


@dataclass(frozen=True)
class Plan:
    """When the sites 0 .. `num_sites` - 1 of a chain read, and what.

    starts: the first site of each tile, ascending from 0.
    block: None where every site appends its own source: site j then has sources 0 .. j. Otherwise the sources are the
        embedding and sums over `block` sites: the newest one changes at every site until its block is full.
    """

    num_sites: int
    starts: tuple[int, ...]
    block: int | None = None

    @staticmethod
    def full(num_sites: int) -> Plan:
        """The chain in which every site appends a source: about sqrt(num_sites) tiles."""
        most = NARROW if num_sites < MANY_SITES else WIDE
        return Plan.of_tiles(num_sites, max(1, round(math.sqrt(num_sites)), math.ceil(num_sites / most)), most)

    @staticmethod
    def of_tiles(num_sites: int, tiles: int, most: int = WIDE) -> Plan:
        """Tiles of at most `most` sites, each one larger than the one before as far as that goes.

        Such sizes move the fewest rows: one more site in a tile costs its merges 4 S rows, and the inter read of each
        tile after it 4. So the sites are given out one by one to where they cost least.
        """
        sizes = [1] * tiles
        for _ in range(num_sites - tiles):
            costs = [size - tile if size < most else num_sites for tile, size in enumerate(sizes)]
            sizes[costs.index(min(costs))] += 1
        return Plan(num_sites, tuple(sum(sizes[:i]) for i in range(tiles)))

    @staticmethod
    def blocks(num_sites: int, block: int) -> Plan:
        """The chain whose sources are sums over `block` sites.

        The first site reads the embedding alone. The sites after it that see the same finished sources, up to the one
        that sees the block's sum complete, are a tile, or several where a block has more sites than a tile may have.
        """
        return Plan(num_sites, (0, *_cuts(1, num_sites, block)), block)

    @staticmethod
    def deltas(num_sites: int, block: int) -> Plan:
        """The chain whose sources are the embedding and the sums over finished blocks of `block` sites."""
        return Plan(num_sites, _cuts(0, num_sites, block), block)

    def tile(self, site: int) -> tuple[int, int]:
        """First site of the tile of `site`, and the first one after it."""
        start, end = 0, self.num_sites
        for first in reversed(self.starts):
            if first <= site:
                start = first
                break
            end = first
        return start, end

    def num_sources(self, site: int) -> int:
        """How many sources `site` reads."""
        if self.block is None:
            return site + 1
        return 1 if site == 0 else 2 + (site - 1) // self.block

    def num_finished(self, site: int) -> int:
        """How many of them the inter read of its tile covers."""
        start, _ = self.tile(site)
        return start if self.block is None else self.num_sources(start) - 1

    def appends(self, site: int) -> bool:
        """Whether the output of `site` is a source of its own, rather than added to the newest."""
        return self.block is None or site % self.block == 0


def _cuts(first: int, end: int, block: int) -> tuple[int, ...]:
    """First sites of the tiles: one for each block, or several where a block has more sites than a tile may have."""
    starts: list[int] = []
    for start in range(first, end, block):
        size = min(block, end - start)
        tiles = math.ceil(size / NARROW)
        starts += [start + size * i // tiles for i in range(tiles)]
    return tuple(starts)
