"""Sums over the parts in which the programs of a backward leave the gradient of a weight, in Triton.

One launch for a few rows that may be of two dtypes, in a fixed order: two runs give the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthroute.ops.kernels.launch import cdiv, launch

COLUMNS, WARPS = 8, 8  # few columns, a sector of memory, so that most of the card takes part
LEAST_AT_ONCE, MOST_AT_ONCE = 256, 1024  # parts: all that there are, so that they are on their way together


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


def sum_parts(parts: Tensor, second_dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Sums over the first dimension of parts (P, R, D), fp32: of all R rows (R, D), and nothing.

    With a `second_dtype`, R must be 2: the sum of the first row (D,), and of the second one (D,) in that dtype.
    """
    P, R, D = parts.shape
    if second_dtype is None:
        first, second = sum_columns(parts.view(P, R * D), R * D, parts.dtype)
        return first.view(R, D), second
    return sum_columns(parts.view(P, R * D), D, second_dtype)


def sum_columns(parts: Tensor, first: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Sums over the first dimension of parts (P, W), fp32: of the first columns, and of the others in that dtype."""
    P, width = parts.shape
    sums, others = parts.new_empty(first), parts.new_empty(width - first, dtype=dtype)
    arguments = (parts, sums, others if width > first else sums, P, width, first)
    at_once = min(MOST_AT_ONCE, max(LEAST_AT_ONCE, triton.next_power_of_2(P)))
    launch(sum_parts_kernel, cdiv(width, COLUMNS), arguments, (at_once, COLUMNS), num_warps=WARPS)
    return sums, others
