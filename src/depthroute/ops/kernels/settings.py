"""How much of a read one program of the two phases holds, and how many programs there are.

Each choice is a plain function of the shape. `overriding` replaces some of them for a while, to look for better ones.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import triton

WARP = 32
LANE = 8  # elements of a row that each lane holds: one 16-byte load of bf16
MAX_LANE = 16
MAX_WARPS = 16
MAX_ROW = MAX_WARPS * WARP * MAX_LANE
MAX_PARTS = 9  # of a head, in a row of a merge, or of a chunk of a head
INTER_PART = 32  # the most channels of a part in an inter read: 4 lanes of a product, each with a 16-byte load of bf16
INTER_SOURCES = 16  # at a time: the rows of a product
# By the size of an element: channels of a head that one warp multiplies, the most warps of a program, and the most
# bytes of a head of one source that its shared memory has room for. Products in fp32 run on CUDA cores, in pieces.
CHUNK = {2: 128, 4: 32}
MAX_CHUNKS = {2: 8, 4: 16}
MAX_HEAD = {2: 3072, 4: 2048}

# Of an H200. Constants, so that the order of a sum, whose parts are what a program leaves, never depends on the device.
MULTIPROCESSORS = 132
REGISTERS = 65536  # of a multiprocessor, whose quarters run warps, and have registers, of their own
QUARTERS = 4
SHARED = 233472  # bytes of shared memory
RESERVED = 1024  # of them, for each program beside its own
MAX_REGISTERS = 255  # of a lane
MOST_PARTS = 512  # in which a merge leaves a weight's gradient: what is summed has no nearly empty round
INTERPRETED_PROGRAMS = 3  # of a backward, whose programs leave a sum each

_overrides: dict[str, Any] = {}
Shape = ParamSpec("Shape")
Choice = TypeVar("Choice")


class MergeTile(NamedTuple):
    """Block of one program of a merge: `tokens` x `heads` x `parts` x `width`."""

    tokens: int
    heads: int
    width: int
    parts: int
    warps: int

    def block(self, num_heads: int, width: int) -> tuple[int, ...]:
        """H, K, BT, BH, W, P of the kernels, for rows of `width` values."""
        return num_heads, width // num_heads, self.tokens, self.heads, self.width, self.parts


class InterTile(NamedTuple):
    """Block of one program of an inter read: one token and head, `sources` x `chunks` x `parts` x `width`."""

    sources: int
    sites: int
    chunks: int
    width: int
    parts: int
    warps: int

    def block(self, num_heads: int, width: int) -> tuple[int, ...]:
        """H, K, BN, BS, C, W, P of the kernels, for rows of `width` values."""
        return num_heads, width // num_heads, self.sources, self.sites, self.chunks, self.width, self.parts


@contextlib.contextmanager
def overriding(**values: Any) -> Iterator[None]:
    """Use these settings in place of the chosen ones: merge_forward_warps, inter_backward_sources and the like."""
    _overrides.update(values)
    try:
        yield
    finally:
        for name in values:
            del _overrides[name]


def _remembered(choose: Callable[Shape, Choice]) -> Callable[Shape, Choice]:
    """A choice is made anew only where settings are replaced: to make it takes the host longer than a launch."""
    made: dict[tuple[Any, ...], Choice] = {}

    @functools.wraps(choose)
    def remembering(*shape: Shape.args, **named: Shape.kwargs) -> Choice:
        if _overrides:
            return choose(*shape, **named)
        key = (_interpreted(), *shape, *named.items())
        if key not in made:
            made[key] = choose(*shape, **named)
        return made[key]

    return remembering


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def obstacle(num_heads: int, head_width: int, itemsize: int) -> str | None:
    """Why the kernels cannot do reads of this shape; None where they can."""
    width, count = _parts(head_width)
    if triton.next_power_of_2(num_heads) * width * count > MAX_ROW:
        return f"a row of {num_heads * head_width} values is too wide for the registers of one program"
    chunks, width, count = _chunks(head_width, itemsize, CHUNK[itemsize], INTER_PART)
    if chunks * width * count * itemsize > MAX_HEAD[itemsize]:
        return f"a head of {head_width} channels is too wide for the shared memory of one program"
    return None


@_remembered
def merge_tile(num_heads: int, head_width: int, itemsize: int, phase: str) -> MergeTile:
    """Tile of a merge; `phase` is "forward" or "backward"."""
    heads = triton.next_power_of_2(num_heads)
    width, count = _parts(head_width)
    row = heads * width * count
    # The widest rows take all the warps there may be, and more of a row a lane.
    lane = max(_overrides.get(f"merge_{phase}_lane", LANE), row // (MAX_WARPS * WARP))
    wanted = _overrides.get(f"merge_{phase}_warps", 2 if phase == "forward" else 4)
    tokens = _power_of_2(wanted * WARP * lane // row)
    # Two values a lane of each part at least: loads of less than four bytes are slow.
    warps = _power_of_2(min(tokens * row // (WARP * lane), tokens * heads * width // (2 * WARP)))
    return MergeTile(tokens, heads, width, count, warps)


@_remembered
def merge_budget(tile: MergeTile, itemsize: int, num_sources: int) -> tuple[int, int]:
    """Registers of a lane in a backward merge, and its programs: as many as then run at once.

    It would take up to 230. With fewer, more warps wait for memory at a time; far fewer, and it spills.
    """
    few = tile.parts == 1 and itemsize == 2 and num_sources <= 6
    registers = _registers(_overrides.get("merge_backward_registers", 128 if few else 168), tile.warps)
    resident = MULTIPROCESSORS * _resident(tile.warps, registers)
    return registers, _overrides.get("merge_backward_programs", INTERPRETED_PROGRAMS if _interpreted() else resident)


@_remembered
def gated_budget(tile: MergeTile) -> tuple[int, int]:
    """Registers of a lane in a backward gated merge, and its programs: as many as then run at once.

    Of a token there are two rows, so programs must be many for enough of them to be on their way at a time.
    """
    held = tile.tokens * tile.heads * tile.width * tile.parts // (WARP * tile.warps)  # values of a row in a lane
    wanted = 64 if held <= LANE else 80 if held <= 12 else 128
    registers = _registers(_overrides.get("gated_backward_registers", wanted), tile.warps)
    resident = MULTIPROCESSORS * _resident(tile.warps, registers)
    return registers, _overrides.get("gated_backward_programs", INTERPRETED_PROGRAMS if _interpreted() else resident)


@_remembered
def inter_tile(num_sites: int, head_width: int, itemsize: int, phase: str) -> InterTile:
    """Tile of an inter read; `phase` is "forward" or "backward"."""
    chunk = _overrides.get(f"inter_{phase}_chunk", CHUNK[itemsize])
    part = _overrides.get(f"inter_{phase}_part", INTER_PART)
    chunks, width, count = _chunks(head_width, itemsize, chunk, part)
    sources = _overrides.get(f"inter_{phase}_sources", INTER_SOURCES)
    return InterTile(sources, max(8, triton.next_power_of_2(num_sites)), chunks, width, count, chunks)


@_remembered
def inter_budget(tile: InterTile, num_heads: int, itemsize: int, phase: str) -> tuple[int, int]:
    """Registers of a lane in an inter read, and the most programs for one head: as many as then run at once.

    Forward so few registers that many warps run at once and nothing spills; backward all that there may be are faster
    in spite of fewer warps. The programs of a backward leave a sum each, so there are not too many of them where there
    are few heads.
    """
    wanted = MAX_REGISTERS if phase == "backward" else 128 if tile.sites <= 8 else 168
    registers = _registers(_overrides.get(f"inter_{phase}_registers", wanted), tile.warps)
    resident = min(_resident(tile.warps, registers), SHARED // (inter_shared(tile, itemsize, phase) + RESERVED))
    programs = max(1, MULTIPROCESSORS * resident // num_heads)
    if phase == "backward":
        programs = min(programs, INTERPRETED_PROGRAMS if _interpreted() else 3 * MULTIPROCESSORS)
    return registers, _overrides.get(f"inter_{phase}_programs", programs)


def weight_parts(num_sites: int, width: int, num_heads: int, dtype: torch.dtype) -> tuple[int, int]:
    """As `two_phase.algebra.weight_parts`: as many as programs of such a backward run at once.

    Whatever the number of tokens, so that shapes are the same for all of them; programs with none leave zeros.
    """
    head_width, itemsize = width // num_heads, dtype.itemsize
    inter = inter_budget(inter_tile(num_sites, head_width, itemsize, "backward"), num_heads, itemsize, "backward")
    merge = merge_budget(merge_tile(num_heads, head_width, itemsize, "backward"), itemsize, 1)
    return inter[1], min(merge[1], MOST_PARTS)


def inter_shared(tile: InterTile, itemsize: int, phase: str) -> int:
    """About the bytes of shared memory of one program of an inter read; the tests hold them beside what compiles.

    Sources turned round, and what the sites have: upstream gradients and queries, or mixes on their way out. Sums over
    chunks cross warps. In fp32 operands pass it too.
    """
    both = 2 if phase == "backward" else 1
    if itemsize == 4:
        channel = 128 + (16 if phase == "backward" else 4) * tile.sites
    else:
        channel = 2 * tile.sources + (6 if phase == "backward" else 4) * tile.sites
    crossing = 4 * tile.chunks * tile.sources * tile.sites * both if tile.chunks > 1 else 0
    return tile.chunks * tile.width * tile.parts * channel + crossing


def _registers(wanted: int, warps: int) -> int:
    """What was wanted, or as many as a lane can have in a program of so many warps."""
    return min(wanted, MAX_REGISTERS, REGISTERS // (WARP * warps))


def _resident(warps: int, registers: int) -> int:
    """Programs that run at once on a multiprocessor, by what they need of its registers."""
    return QUARTERS * (REGISTERS // QUARTERS // (WARP * registers)) // warps


def _power_of_2(most: int) -> int:
    """The largest one that is not above a number; 1 at least."""
    return 1 << max(0, most.bit_length() - 1)


def _parts(width: int) -> tuple[int, int]:
    """Width and number of the equal parts of a head, each a power of two; one, padded, where there would be many."""
    part = width & -width
    return (part, width // part) if width // part <= MAX_PARTS else (triton.next_power_of_2(width), 1)


def _chunks(width: int, itemsize: int, chunk: int, widest: int) -> tuple[int, int, int]:
    """Number of the chunks of a head, a power of two, and of each the width and number of its equal parts.

    A chunk has about `chunk` channels, wider ones rather than padded; a part has 16, which products need, to `widest`,
    and 64 at most where there must be padding, so that there is less of it.
    """
    most = min(MAX_CHUNKS[itemsize], _power_of_2(width // chunk))
    chunks = most
    while chunks:
        each = width // chunks
        part = min(widest, each & -each)
        if each * chunks == width and part >= 16 and each // part <= MAX_PARTS:
            return chunks, part, each // part
        chunks //= 2
    each = triton.cdiv(width, most)
    part = min(64, widest, max(16, triton.next_power_of_2(each)))
    return most, part, triton.cdiv(each, part)
