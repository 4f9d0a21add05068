"""Sums over the parts in which the programs of a backward leave the gradient of a weight, in Triton.

In a fixed order: two runs give the same bits.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthroute.ops.kernels.launch import cdiv, launch, on_device, plain

COLUMNS, WARPS = 8, 8  # few columns, a sector of memory, so that most of the card takes part
LEAST_AT_ONCE, MOST_AT_ONCE = 256, 1024  # parts: all that there are, so that they are on their way together
TILE_COLUMNS, TILE_AT_ONCE = 32, 256  # of a tile there are enough columns for whole lines of memory
SLOTS = (8, 16)  # sites of one launch; addresses are padded to these, so that only two variants are compiled


@triton.jit(do_not_specialize=["P", "W", "D"])
def sum_parts_kernel(parts, first_out, second_out, P, W, D, BP: tl.constexpr, BD: tl.constexpr):
    column = tl.program_id(0) * BD + tl.arange(0, BD)
    acc = tl.zeros((BP, BD), tl.float32)
    for first in range(0, P, BP):
        part = first + tl.arange(0, BP)
        at = part[:, None].to(tl.int64) * W + column[None, :]
        acc += tl.load(parts + at, mask=(part < P)[:, None] & (column < W)[None, :], other=0.0)
    total = tl.sum(acc, 0)
    tl.store(first_out + column, total, mask=column < D)
    second = tl.where(column < D, 0, column - D)
    tl.store(second_out + second, total.to(second_out.dtype.element_ty), mask=(column >= D) & (column < W))


@triton.jit
def _all_parts(parts, count, W, column, there, BP: tl.constexpr, ROUNDS: tl.constexpr):
    """Those columns of all rows of W values, on their way at once: one tensor [BP, columns] for each round."""
    values = ()  # type: tuple[tl.tensor, ...]
    for i in tl.static_range(ROUNDS):
        part = i * BP + tl.arange(0, BP)
        at = part[:, None].to(tl.int64) * W + column[None, :]
        mask = (part < count)[:, None] & there[None, :]
        values = values + (tl.load(parts + at, mask=mask, other=0.0),)  # noqa: RUF005
    return values


@triton.jit(do_not_specialize=["has", "P", "B", "S", "D"])
def sum_weights_kernel(
    merge_parts, inter_parts, out, has, P, B, S, D,
    BP: tl.constexpr, BD: tl.constexpr, OF_MERGE: tl.constexpr, OF_INTER: tl.constexpr,
):  # fmt: skip
    site = tl.program_id(0) % S
    column = tl.program_id(0) // S * BD + tl.arange(0, BD)
    there = column < D
    parts = tl.cast(merge_parts[0], tl.int64)
    for i in tl.static_range(1, len(merge_parts)):
        parts = tl.where(site == i, tl.cast(merge_parts[i], tl.int64), parts)
    parts = tl.multiple_of(parts.to(tl.pointer_type(tl.float32)), 16)
    count = tl.where((has >> site) & 1 != 0, P, 0)
    row = tl.cast(site, tl.int64) * D
    of_merge = _all_parts(parts, count, D, column, there, BP, OF_MERGE)
    of_inter = _all_parts(inter_parts + row, B, S * D, column, there, BP, OF_INTER)
    acc = tl.zeros((BP, BD), tl.float32)
    for i in tl.static_range(OF_MERGE):
        acc += of_merge[i]
    for i in tl.static_range(OF_INTER):
        acc += of_inter[i]
    tl.store(out + row + column, tl.sum(acc, 0), mask=there)


def sum_parts(parts: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The sum over the first dimension of parts (P, ...), fp32, in that dtype."""
    return sum_columns(parts.flatten(1), 0, dtype)[1].view(parts.shape[1:])


def sum_columns(parts: Tensor, first: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Sums over the first dimension of parts (P, W), fp32: of the first columns, and of the others in that dtype."""
    P, width = parts.shape
    sums, others = parts.new_empty(first), parts.new_empty(width - first, dtype=dtype)
    arguments = (parts, sums, others if width > first else sums, P, width, first)
    at_once = min(MOST_AT_ONCE, max(LEAST_AT_ONCE, triton.next_power_of_2(P)))
    launch(sum_parts_kernel, cdiv(width, COLUMNS), arguments, (at_once, COLUMNS), num_warps=WARPS)
    return sums, others


def sum_weights(inter_parts: Tensor | None, merge_parts: Sequence[Tensor | None]) -> Tensor:
    """As `two_phase.algebra.sum_weights`, in one launch for the sites of a tile."""
    present = [plain(part) for part in merge_parts if part is not None]
    P, B = len(present[0]) if present else 0, 0 if inter_parts is None else len(inter_parts)
    like = present[0] if inter_parts is None else plain(inter_parts)
    S, D = len(merge_parts), like.shape[-1]
    out = like.new_empty((S, D))
    size = next((slots for slots in SLOTS if slots >= S), None)
    if size is None:
        raise ValueError(f"a tile has at most {SLOTS[-1]} sites, got {S}")
    rows = iter(present)
    addresses = [(like if part is None else next(rows)).data_ptr() for part in merge_parts]
    has = sum(1 << site for site, part in enumerate(merge_parts) if part is not None)
    arguments = ((*addresses, *addresses[:1] * (size - S)), like, out, has, P, B, S, D)
    constants = (TILE_AT_ONCE, TILE_COLUMNS, cdiv(P, TILE_AT_ONCE), cdiv(B, TILE_AT_ONCE))
    with on_device(out):
        launch(sum_weights_kernel, S * cdiv(D, TILE_COLUMNS), arguments, constants, num_warps=WARPS)
    return out
