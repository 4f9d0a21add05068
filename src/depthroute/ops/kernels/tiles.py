"""How much of a read one program holds in registers."""

from typing import NamedTuple

import triton

# The rule: whole rows, all route heads, in one program; 16 elements a lane (two 16-byte loads of bf16), so a warp for
# every 512 elements, and several tokens where one row is less. More elements a lane would spill: the backward holds
# seven tiles. Sources at a time: as many as the registers leave room for, to keep 64 to 128 bytes a lane in flight.
WARP = 32
LANE = 16
VECTOR = 16  # bytes
MAX_WARPS = 16
MAX_ROW = MAX_WARPS * WARP * LANE

# Warps of the backward that run at once: 12 on each of the 132 multiprocessors of an H200. A constant, so that the
# order of the sums over tokens, and with it every bit of a query gradient, does not depend on the device.
RESIDENT_WARPS = 132 * 12


class Tile(NamedTuple):
    """Block of one program: `tokens` x `heads` x `width` elements (powers of two), `unroll` sources at a time."""

    tokens: int
    heads: int
    width: int
    warps: int
    unroll: int

    def block(self, num_heads: int, width: int) -> tuple[int, ...]:
        """H, K, BT, BH, BK, UNROLL of the kernels, for rows of `width` values."""
        return num_heads, width // num_heads, self.tokens, self.heads, self.width, self.unroll

    @property
    def programs(self) -> int:
        """Programs of the backward that run at once; each leaves one partial sum of the query gradient."""
        return max(1, RESIDENT_WARPS // self.warps)


def read_tile(num_heads: int, head_width: int, itemsize: int) -> Tile | None:
    """Tile of one read; None where a row is too wide for registers."""
    heads, width = triton.next_power_of_2(num_heads), triton.next_power_of_2(head_width)
    row = heads * width
    if row > MAX_ROW:
        return None
    warps = max(1, row // (WARP * LANE))
    sources = 4 if warps <= 2 else 2 if warps < MAX_WARPS else 1
    if head_width * itemsize % VECTOR:
        sources = 1  # element by element: the addresses fill the registers
    return Tile(max(1, WARP * LANE // row), heads, width, warps, max(1, sources * 2 // itemsize))


def wide_tile(num_heads: int) -> Tile:
    """Tile of one read whose rows are too wide for registers: all heads, a slice of each."""
    heads = triton.next_power_of_2(num_heads)
    return Tile(1, heads, max(1, MAX_ROW // heads), MAX_WARPS, 1)
