"""How much of a read one program holds in registers."""

from typing import NamedTuple

import triton

WARP = 32
LANE = 16  # elements of a tile for each lane; more would spill in the backward, which holds five tiles
MAX_WARPS = 16
MAX_TILE = MAX_WARPS * WARP * LANE
LOADS = 128  # bytes that each lane keeps in flight

# Warps that run at once: 16 on each of the 132 multiprocessors of an H200. A constant, so that the order of the sums
# over tokens, and with it every bit of the result, is the same on every device.
RESIDENT_WARPS = 132 * 16


class Tile(NamedTuple):
    """Block of one program: `tokens` x `heads` x `width` elements (powers of two), `unroll` sources at a time."""

    tokens: int
    heads: int
    width: int
    warps: int
    unroll: int

    @property
    def programs(self) -> int:
        """Programs that run at once; each leaves one partial sum for the query gradient."""
        return max(1, RESIDENT_WARPS // self.warps)


def read_tile(num_heads: int, head_width: int, itemsize: int) -> Tile | None:
    """Tile of one read: whole rows, 16 elements a lane, as many tokens as fill a warp; None where a row is too wide."""
    heads, width = triton.next_power_of_2(num_heads), triton.next_power_of_2(head_width)
    row = heads * width
    if row > MAX_TILE:
        return None
    tokens = max(1, WARP * LANE // row)
    return Tile(tokens, heads, width, max(1, row // (WARP * LANE)), max(1, LOADS // (LANE * itemsize)))


def wide_tile(num_heads: int) -> Tile:
    """Tile of one read whose rows are wider than the registers: all heads, a slice of each."""
    heads = triton.next_power_of_2(num_heads)
    return Tile(1, heads, max(1, MAX_TILE // heads), MAX_WARPS, 1)
