"""One read in Triton for rows that are wider than the registers of a program.

As `read.py`, but each row passes through in slices, twice in a row (the second time from cache), and the sums that
`read.py` keeps in registers lie in a row of scratch memory that belongs to one program alone.
"""

import triton
import triton.language as tl
from torch import Tensor

from depthroute.ops.kernels.launch import address, launch, pointer
from depthroute.ops.kernels.tiles import wide_tile


@triton.jit(do_not_specialize=["N", "T"])
def _forward_kernel(
    table, weight, scratch, mix, lse, rstd, N, T, eps,
    H: tl.constexpr, K: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    head = tl.arange(0, BH)
    acc = scratch + program.to(tl.int64) * (H * K)
    for t in range(program, T, tl.num_programs(0)):
        token = tl.cast(t, tl.int64)
        row = token * (H * K)
        top = tl.full((BH,), float("-inf"), tl.float32)
        total = tl.zeros((BH,), tl.float32)
        for n in range(N):
            source = pointer(address(table, n, N), mix.dtype.element_ty) + row
            raw = tl.zeros((BH,), tl.float32)
            square = tl.zeros((BH,), tl.float32)
            for first in range(0, K, BK):
                at, mask = _slice(head, first, H, K, BK)
                v = tl.load(source + at, mask=mask, other=0.0).to(tl.float32)  # [BH, BK]
                raw += tl.sum(v * tl.load(weight + at, mask=mask, other=0.0), 1)
                square += tl.sum(v * v, 1)
            r = tl.rsqrt(tl.sum(square, 0) / (H * K) + eps)
            tl.store(rstd + token * N + n, r)
            new_top = tl.maximum(top, raw * r)
            decay, p = tl.exp(top - new_top), tl.exp(raw * r - new_top)
            total = total * decay + p
            top = new_top
            for first in range(0, K, BK):
                at, mask = _slice(head, first, H, K, BK)
                v = tl.load(source + at, mask=mask, other=0.0).to(tl.float32)
                old = tl.load(acc + at, mask=mask & (n > 0), other=0.0)
                tl.store(acc + at, old * decay[:, None] + p[:, None] * v, mask=mask)
            tl.debug_barrier()  # the lane that loads it next need not be the one that stored it
        for first in range(0, K, BK):
            at, mask = _slice(head, first, H, K, BK)
            value = tl.load(acc + at, mask=mask, other=0.0) / total[:, None]
            tl.store(mix + row + at, value.to(mix.dtype.element_ty), mask=mask)
        tl.store(lse + token * H + head, top + tl.log(total), mask=head < H)


@triton.jit(do_not_specialize=["N", "T"])
def _backward_kernel(
    table, grad, weight, lse, rstd, partial, N, T,
    H: tl.constexpr, K: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    head = tl.arange(0, BH)
    dtype: tl.constexpr = grad.dtype.element_ty
    dw = partial + program.to(tl.int64) * (H * K)
    for t in range(program, T, tl.num_programs(0)):
        token = tl.cast(t, tl.int64)
        row = token * (H * K)
        z = tl.load(lse + token * H + head, mask=head < H, other=0.0)
        delta = tl.zeros((BH,), tl.float32)
        for n in range(N):
            raw, dp = _products(table, n, N, weight, grad, row, head, dtype, H, K, BH, BK)
            delta += tl.exp(raw * tl.load(rstd + token * N + n) - z) * dp
        for n in range(N):
            wanted = address(table, n, N) != address(table + N, n, N)
            source = pointer(address(table, n, N), dtype) + row
            target = pointer(address(table + N, n, N), dtype) + row
            r = tl.load(rstd + token * N + n)
            raw, dp = _products(table, n, N, weight, grad, row, head, dtype, H, K, BH, BK)
            p = tl.exp(raw * r - z)
            dl = p * (dp - delta)
            c = tl.sum(dl * raw, 0) * (r * r * r / (H * K))
            for first in range(0, K, BK):
                at, mask = _slice(head, first, H, K, BK)
                v = tl.load(source + at, mask=mask, other=0.0).to(tl.float32)
                w = tl.load(weight + at, mask=mask, other=0.0)
                g = tl.load(grad + row + at, mask=mask, other=0.0).to(tl.float32)
                ds = p[:, None] * g + (dl * r)[:, None] * w - c * v
                tl.store(target + at, ds.to(dtype), mask=mask & wanted)
                old = tl.load(dw + at, mask=mask & ((n > 0) | (t > program)), other=0.0)
                tl.store(dw + at, old + (dl * r)[:, None] * v, mask=mask)
            tl.debug_barrier()  # the lane that loads it next need not be the one that stored it


@triton.jit
def _products(
    table, n, N, weight, grad, row, head,
    dtype: tl.constexpr, H: tl.constexpr, K: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Inner products of row n, for each head: with the weight and with the gradient."""
    source = pointer(address(table, n, N), dtype) + row
    raw = tl.zeros((BH,), tl.float32)
    dp = tl.zeros((BH,), tl.float32)
    for first in range(0, K, BK):
        at, mask = _slice(head, first, H, K, BK)
        v = tl.load(source + at, mask=mask, other=0.0).to(tl.float32)
        raw += tl.sum(v * tl.load(weight + at, mask=mask, other=0.0), 1)
        dp += tl.sum(v * tl.load(grad + row + at, mask=mask, other=0.0).to(tl.float32), 1)
    return raw, dp


@triton.jit
def _slice(head, first, H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    k = first + tl.arange(0, BK)
    return head[:, None] * K + k[None, :], (head < H)[:, None] & (k < K)[None, :]


def forward(table: Tensor, weight: Tensor, mix: Tensor, lse: Tensor, rstd: Tensor, N: int, T: int, eps: float) -> None:
    """Fill mix (..., D), lse (..., H) and rstd (..., N) from a table of N source pointers."""
    D, H = mix.shape[-1], lse.shape[-1]
    tile = wide_tile(H)
    scratch = weight.new_empty((min(T, tile.programs), D))
    arguments = (table, weight, scratch, mix, lse, rstd, N, T, eps)
    launch(_forward_kernel, len(scratch), arguments, (H, D // H, tile.heads, tile.width), num_warps=tile.warps)


def backward(table: Tensor, grad: Tensor, weight: Tensor, lse: Tensor, rstd: Tensor, N: int, T: int) -> Tensor:
    """Fill the source gradients from a table of N source and N target pointers; return the gradient of the weight."""
    D, H = grad.shape[-1], lse.shape[-1]
    tile = wide_tile(H)
    partial = weight.new_empty((min(T, tile.programs), D))
    arguments = (table, grad, weight, lse, rstd, partial, N, T)
    launch(_backward_kernel, len(partial), arguments, (H, D // H, tile.heads, tile.width), num_warps=tile.warps)
    return partial.sum(0)
