"""One read in Triton: any number of sources, route heads and width.

Rows of D values for each token: forward N and 1 written; backward N + 1 and N written, and the query gradient's partial
sums. The backward passes over the sources twice, the second time from cache while there are not too many: first for
delta = <gradient, mix>, since the mix as it was rounded would bring its rounding into every gradient of a logit, and
those nearly cancel in a query's gradient.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthroute.ops.kernels import wide
from depthroute.ops.kernels.launch import (
    address,
    cdiv,
    contiguous_like,
    launch,
    on_device,
    plain,
    pointer,
    pointer_table,
)
from depthroute.ops.kernels.tiles import read_tile


@triton.jit(do_not_specialize=["N", "T"])
def _forward_kernel(
    table, weight, mix, lse, rstd, N, T, eps,
    H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    head, k = tl.arange(0, BH), tl.arange(0, BK)
    live = token < T
    column = head[None, :, None] * K + k[None, None, :]
    inside = (head < H)[None, :, None] & (k < K)[None, None, :]
    row = token[:, None, None] * (H * K) + column
    mask = live[:, None, None] & inside

    w = tl.load(weight + column, mask=inside, other=0.0)  # [1, BH, BK]
    top = tl.full((BT, BH), float("-inf"), tl.float32)
    total = tl.zeros((BT, BH), tl.float32)
    acc = tl.zeros((BT, BH, BK), tl.float32)
    for first in range(0, N, UNROLL):
        values = ()  # type: tuple[tl.tensor, ...]
        for i in tl.static_range(UNROLL):  # every load is on its way before the first is used
            source = pointer(address(table, first + i, N), mix.dtype.element_ty)
            values = values + (tl.load(source + row, mask=mask & (first + i < N), other=0.0),)  # noqa: RUF005
        logits = ()  # type: tuple[tl.tensor, ...]
        new_top = top
        for i in tl.static_range(UNROLL):
            v = values[i].to(tl.float32)
            r = tl.rsqrt(tl.sum(tl.sum(v * v, 2), 1) / (H * K) + eps)  # [BT]
            tl.store(rstd + token * N + first + i, r, mask=live & (first + i < N))
            logit = tl.sum(v * w, 2) * r[:, None]  # [BT, BH]
            logit = tl.where(first + i < N, logit, float("-inf"))
            new_top = tl.maximum(new_top, logit)
            logits = logits + (logit,)  # noqa: RUF005
        decay = tl.exp(top - new_top)
        total *= decay
        acc *= decay[:, :, None]
        for i in tl.static_range(UNROLL):
            p = tl.exp(logits[i] - new_top)
            total += p
            acc += p[:, :, None] * values[i].to(tl.float32)
        top = new_top
    tl.store(mix + row, (acc / total[:, :, None]).to(mix.dtype.element_ty), mask=mask)
    tl.store(lse + token[:, None] * H + head[None, :], top + tl.log(total), mask=live[:, None] & (head < H)[None, :])


@triton.jit(do_not_specialize=["N", "T", "steps"])
def _backward_kernel(
    table, grad, weight, lse, rstd, partial, N, T, steps,
    H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = grad.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    head, k = tl.arange(0, BH), tl.arange(0, BK)
    column = head[None, :, None] * K + k[None, None, :]
    inside = (head < H)[None, :, None] & (k < K)[None, None, :]

    w = tl.load(weight + column, mask=inside, other=0.0)  # [1, BH, BK]
    dw = tl.zeros((BT, BH, BK), tl.float32)
    for step in range(steps):
        token = (program * steps + step) * BT + tl.arange(0, BT)
        live = token < T
        row = token[:, None, None] * (H * K) + column
        mask = live[:, None, None] & inside
        g = tl.load(grad + row, mask=mask, other=0.0).to(tl.float32)
        z = tl.load(lse + token[:, None] * H + head[None, :], mask=live[:, None] & (head < H)[None, :], other=0.0)
        delta = tl.zeros((BT, BH), tl.float32)
        for first in range(0, N, UNROLL):
            values = ()  # type: tuple[tl.tensor, ...]
            for i in tl.static_range(UNROLL):
                source = pointer(address(table, first + i, N), dtype)
                values = values + (tl.load(source + row, mask=mask & (first + i < N), other=0.0),)  # noqa: RUF005
            for i in tl.static_range(UNROLL):
                n = first + i
                v = values[i].to(tl.float32)
                r = tl.load(rstd + token * N + n, mask=live & (n < N), other=0.0)[:, None]  # [BT, 1]
                p = tl.exp(tl.where(n < N, tl.sum(v * w, 2) * r - z, float("-inf")))
                delta += p * tl.sum(v * g, 2)
        for first in range(0, N, UNROLL):
            values = ()
            for i in tl.static_range(UNROLL):
                source = pointer(address(table, first + i, N), dtype)
                values = values + (tl.load(source + row, mask=mask & (first + i < N), other=0.0),)  # noqa: RUF005
            for i in tl.static_range(UNROLL):
                n = first + i
                v = values[i].to(tl.float32)
                r = tl.load(rstd + token * N + n, mask=live & (n < N), other=0.0)[:, None]  # [BT, 1]
                raw = tl.sum(v * w, 2)
                p = tl.exp(tl.where(n < N, raw * r - z, float("-inf")))
                dl = p * (tl.sum(v * g, 2) - delta)
                u = dl * r
                c = tl.sum(dl * raw, 1)[:, None] * (r * r * r / (H * K))  # [BT, 1]
                ds = p[:, :, None] * g + u[:, :, None] * w - c[:, :, None] * v
                target = address(table + N, n, N)
                wanted = (n < N) & (target != address(table, n, N))
                target = pointer(target, dtype)
                tl.store(target + row, ds.to(dtype), mask=mask & wanted)
                dw += u[:, :, None] * v
    column2 = head[:, None] * K + k[None, :]
    tl.store(partial + program * (H * K) + column2, tl.sum(dw, 0), mask=(head < H)[:, None] & (k < K)[None, :])


def forward(sources: Sequence[Tensor], weight: Tensor, num_heads: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """N sources (..., D), fp32 weight (D,) -> mix (..., D), log-sum-exps (..., H), 1 / rms of the sources (..., N)."""
    D = sources[0].shape[-1]
    mix = contiguous_like(sources[0])
    lse = weight.new_empty((*mix.shape[:-1], num_heads))
    rstd = weight.new_empty((*mix.shape[:-1], len(sources)))
    rows, weight, T = [plain(source) for source in sources], plain(weight), mix.numel() // D
    tile = read_tile(num_heads, D // num_heads, mix.element_size())
    with on_device(mix):
        table = pointer_table(rows)
        if tile is None:
            wide.forward(table, weight, mix, lse, rstd, len(rows), T, eps)
        else:
            arguments = (table, weight, mix, lse, rstd, len(rows), T, eps)
            programs = cdiv(T, tile.tokens)
            launch(_forward_kernel, programs, arguments, tile.block(num_heads, D), num_warps=tile.warps)
    return mix, lse, rstd


def backward(
    grad: Tensor,
    sources: Sequence[Tensor],
    weight: Tensor,
    lse: Tensor,
    rstd: Tensor,
    num_heads: int,
    wanted: Sequence[bool],
) -> tuple[list[Tensor], Tensor]:
    """Gradients of the wanted sources, in order, and of the weight. Of any strides: `grad` (..., D) and the sources."""
    D = grad.shape[-1]
    if len(sources) == 1:
        # The only weight is 1 whatever the query is. Recomputed, it could be off by a rounding.
        return [grad.clone(memory_format=torch.contiguous_format)] if wanted[0] else [], torch.zeros_like(weight)
    rows, weight, grad, T = [plain(source) for source in sources], plain(weight), plain(grad), grad.numel() // D
    grads = [contiguous_like(grad) for each in wanted if each]
    rest = iter(grads)
    # A source as its own target means that its gradient is not wanted; the kernels write no such target.
    targets = [next(rest) if each else row for row, each in zip(rows, wanted, strict=True)]
    tile = read_tile(num_heads, D // num_heads, grad.element_size())
    with on_device(grad):
        table = pointer_table([*rows, *targets])
        if tile is None:
            return grads, wide.backward(table, grad, weight, lse, rstd, len(rows), T)
        blocks = cdiv(T, tile.tokens)
        steps = max(1, cdiv(blocks, tile.programs))
        partial = weight.new_empty((cdiv(blocks, steps), D))
        arguments = (table, grad, weight, lse, rstd, partial, len(rows), T, steps)
        launch(_backward_kernel, len(partial), arguments, tile.block(num_heads, D), num_warps=tile.warps)
        return grads, partial.sum(0)
