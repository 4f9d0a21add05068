"""Finished sources read for all sites of a tile at once, in Triton, on tensor cores.

A program reads one token and head after another: values v [sources, channels], queries w [channels, sites]. Two
products forward, v w and v^T p; sites are their narrow side, 8 with 16-bit operands, so nothing is padded. Three
backward, with the upstream gradients and the queries of all sites in turn, g: v g^T, v^T u, and (p, u) g. Channels are
cut into chunks, a warp for each, and the products are batched over them; only logits cross warps.
Rows of D values for N sources, S sites and each token: forward N read and S written; backward N + S read, N written,
and N more read where sums so far come in: at 64 sources and 8 sites about 36 operations a byte, so memory is the bound.
What keeps the kernels from it is in docs/operator.md.

16-bit queries are kept as a high and a low part, whose sum has the precision of the logits' other factor and more; the
low part is a product of its own.

An exact backward makes <d partial, partial> of the sources: where they are few, as it reads them; where they are more
than a program holds at once, in a pass before that, which reads them once more.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthroute.ops.kernels.launch import launch, on_device, plain, pointer_table
from depthroute.ops.kernels.rows import opaque
from depthroute.ops.kernels.settings import inter_programs, inter_registers, inter_tile
from depthroute.ops.kernels.sums import sum_parts


@triton.jit
def _pointers(table, n, there, dtype: tl.constexpr):
    """Entries n of a table of addresses, as pointers known to be aligned for vector loads; null where not there."""
    addresses = tl.load(table + n, mask=there, other=0)
    return tl.multiple_of(addresses.to(tl.pointer_type(dtype)), [16])


@triton.jit
def _load(table, N, at_rstd, n, live, row, stat, k_a, k_b, K: tl.constexpr, dtype: tl.constexpr, BB: tl.constexpr):
    """Rows n of one token and head, [chunks, rows, channels] in two blocks, and their rstd."""
    there = (n < N) & live
    source = _pointers(table, n, there, dtype)[None, :, None]
    v_a = tl.load(source + (row + k_a)[:, None, :], mask=there[None, :, None] & (k_a < K)[:, None, :], other=0.0)
    v_b = v_a
    if BB > 0:
        v_b = tl.load(source + (row + k_b)[:, None, :], mask=there[None, :, None] & (k_b < K)[:, None, :], other=0.0)
    r = tl.load(_pointers(table + at_rstd, n, there, tl.float32) + stat, mask=there, other=0.0)
    return v_a, v_b, r


@triton.jit
def _rows_of(
    table, N, at_rstd, first, some, token, T, head, k_a, k_b,
    dtype: tl.constexpr, H: tl.constexpr, K: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """`_load` of the rows from `first` on of a token."""
    row, stat = token * (H * K) + head * K, token * H + head
    return _load(table, N, at_rstd, first + some, token < T, row, stat, k_a, k_b, K, dtype, BB)


@triton.jit
def _split(x, dtype: tl.constexpr):
    """x in fp32 as a high and a low part of a narrower type."""
    high = x.to(dtype)
    return high, (x - high.to(tl.float32)).to(dtype)


@triton.jit
def _product(v, high, low, acc, SPLIT: tl.constexpr):
    """acc + v (high + low)."""
    acc = tl.dot(v, high, acc, input_precision="ieee")
    if SPLIT:
        acc = tl.dot(v, low, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["N", "S", "T", "steps"])
def inter_forward_kernel(
    table, weight, N, S, T, steps, dtype: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    BN: tl.constexpr, BS: tl.constexpr, C: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    SPLIT: tl.constexpr = dtype != tl.float32
    head = tl.program_id(0) % H
    block = tl.program_id(0).to(tl.int64) // H
    site, some = tl.arange(0, BS), tl.arange(0, BN)
    chunk = tl.arange(0, C)[:, None]
    k_a = chunk * BA + tl.arange(0, BA)[None, :]  # [C, BA]
    k_b = C * BA + chunk * BB + tl.arange(0, BB)[None, :] if BB > 0 else k_a
    queries = weight + site[None, None, :] * (H * K) + head * K
    asks = (site < S)[None, None, :]
    w_a, low_a = _split(tl.load(queries + k_a[:, :, None], mask=asks & (k_a < K)[:, :, None], other=0.0), dtype)
    if BB > 0:
        w_b, low_b = _split(tl.load(queries + k_b[:, :, None], mask=asks & (k_b < K)[:, :, None], other=0.0), dtype)

    # The next rows are on their way meanwhile: of this token, or the first ones of the token after it.
    next_a, next_b, next_r = _rows_of(table, N, N, 0, some, block * steps, T, head, k_a, k_b, dtype, H, K, BB)
    for step in range(steps):
        token = block * steps + opaque(step)
        row = token * (H * K) + head * K
        stat = token * H + head
        live = token < T
        top = tl.full((BS,), float("-inf"), tl.float32)
        total = tl.zeros((BS,), tl.float32)
        rounded = tl.zeros((BS,), tl.float32)  # the sum of the weights as the products take them
        acc_a = tl.zeros((C, BA, BS), tl.float32)
        acc_b = tl.zeros((C, BB, BS), tl.float32) if BB > 0 else acc_a
        for first in range(0, N, BN):
            there = (first + some < N) & live
            v_a, v_b, r = next_a, next_b, next_r  # [C, BN, BA], [C, BN, BB], [BN]
            last = first + BN >= N
            next_a, next_b, next_r = _rows_of(
                table, N, N, tl.where(last, 0, first + BN), some, token + last, T, head, k_a, k_b, dtype, H, K, BB
            )
            raw = _product(v_a, w_a, low_a, tl.zeros((C, BN, BS), tl.float32), SPLIT)
            if BB > 0:
                raw = _product(v_b, w_b, low_b, raw, SPLIT)
            logits = tl.where(there[:, None], tl.sum(raw, 0) * r[:, None], float("-inf"))  # [BN, BS]
            new_top = tl.maximum(top, tl.max(logits, 0))
            new_top = tl.where(live, new_top, 0.0)  # a token past the end has no logits
            decay = tl.exp(top - new_top)
            p = tl.exp(logits - new_top[None, :])
            total = total * decay + tl.sum(p, 0)
            p = p.to(dtype)
            rounded = rounded * decay + tl.sum(p.to(tl.float32), 0)
            top = new_top
            p = tl.broadcast_to(p[None, :, :], (C, BN, BS))
            acc_a = tl.dot(tl.trans(v_a, (0, 2, 1)), p, acc_a * decay[None, None, :], input_precision="ieee")
            if BB > 0:
                acc_b = tl.dot(tl.trans(v_b, (0, 2, 1)), p, acc_b * decay[None, None, :], input_precision="ieee")
        written = (site < S) & live
        lse = _pointers(table + 2 * N + S, site, written, tl.float32)
        tl.store(lse + stat, top + tl.log(total), mask=written)
        partial = _pointers(table + 2 * N, site, written, dtype)[None, :, None]
        whole = 1 / rounded
        mix_a = tl.trans(acc_a * whole[None, None, :], (0, 2, 1)).to(dtype)
        tl.store(partial + (row + k_a)[:, None, :], mix_a, mask=written[None, :, None] & (k_a < K)[:, None, :])
        if BB > 0:
            mix_b = tl.trans(acc_b * whole[None, None, :], (0, 2, 1)).to(dtype)
            tl.store(partial + (row + k_b)[:, None, :], mix_b, mask=written[None, :, None] & (k_b < K)[:, None, :])


@triton.jit
def _pairs(table, at, S, k, K: tl.constexpr, BS: tl.constexpr, live, dtype: tl.constexpr, H: tl.constexpr, head, token):
    """[C, 2 BS, channels]: the upstream gradient of a site, then its query as rounded, then those of the next site."""
    row = tl.arange(0, 2 * BS)
    is_query = row % 2 == 1
    there = (row < 2 * S) & (live | is_query)
    rows = _pointers(table + at, row, there, dtype) + tl.where(is_query, 0, token * (H * K)) + head * K
    return tl.load(rows[None, :, None] + k[:, None, :], mask=there[None, :, None] & (k < K)[:, None, :], other=0.0)


@triton.jit
def _sums(table, N, at_other, at, n, there, dtype: tl.constexpr):
    """Pointers to the sums so far, in place n of the table's part `at`, and which of them there are."""
    addresses = tl.load(table + at + n, mask=there, other=0)
    others = tl.load(table + at_other + n, mask=there, other=0)
    return tl.multiple_of(addresses.to(tl.pointer_type(dtype)), [16]), there & (addresses != others)


@triton.jit
def _products(
    v_a, v_b, r, low_a, low_b, pairs_a, pairs_b, z, there, SPLIT: tl.constexpr,
    BN: tl.constexpr, BS: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """<source, query>, weight and <upstream gradient, source> of some sources, each [BN, BS]."""
    both = tl.dot(v_a, tl.trans(pairs_a, (0, 2, 1)), input_precision="ieee")
    if BB > 0:
        both = tl.dot(v_b, tl.trans(pairs_b, (0, 2, 1)), both, input_precision="ieee")
    dp, raw = tl.split(tl.reshape(tl.sum(both, 0), (BN, BS, 2)))
    if SPLIT:
        low = tl.dot(v_a, low_a, input_precision="ieee")
        if BB > 0:
            low = tl.dot(v_b, low_b, low, input_precision="ieee")
        raw += tl.sum(low, 0)
    p = tl.where(there[:, None], tl.exp(raw * r[:, None] - z[None, :]), 0.0)
    return raw, p, dp


@triton.jit
def _backward_rows(
    first, table, N, row, stat, live, some, k_a, k_b, low_a, low_b, pairs_a, pairs_b, z, dz,
    dw_a, dw_b, dtype: tl.constexpr, EXACT: tl.constexpr, SUMS: tl.constexpr, ONE: tl.constexpr,
    K: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, C: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """Gradients of the rows from `first` on of one token and head, stored; returns the weights', with theirs added."""
    SPLIT: tl.constexpr = dtype != tl.float32
    n = first + some
    there = (n < N) & live
    v_a, v_b, r = _load(table, N, 3 * N, n, live, row, stat, k_a, k_b, K, dtype, BB)
    if SUMS:
        sums, summed = _sums(table, N, 0, N, n, there, dtype)
        r_sums, r_summed = _sums(table, N, 3 * N, 4 * N, n, there, tl.float32)
        r_sum = tl.load(r_sums + stat, mask=r_summed, other=0.0)
        sums, summed = sums[None, :, None], summed[None, :, None]
        d_a = tl.load(sums + (row + k_a)[:, None, :], mask=summed & (k_a < K)[:, None, :], other=0.0)
        if BB > 0:
            d_b = tl.load(sums + (row + k_b)[:, None, :], mask=summed & (k_b < K)[:, None, :], other=0.0)
    else:
        d_a = tl.zeros((C, BN, BA), tl.float32)
        if BB > 0:
            d_b = tl.zeros((C, BN, BB), tl.float32)
    raw, p, dp = _products(v_a, v_b, r, low_a, low_b, pairs_a, pairs_b, z, there, SPLIT, BN, BS, BB)
    if EXACT and ONE:
        dp -= tl.sum(p * dp, 0)[None, :]
    dl = p * (dp + dz[None, :])
    u = dl * r[:, None]

    dr = tl.sum(dl * raw, 1)
    if SUMS:
        dr += r_sum
    tl.store(_pointers(table + 5 * N, n, there, tl.float32) + stat, dr, mask=there)

    u_high, u_low = _split(u, dtype)
    u_high = tl.broadcast_to(u_high[None, :, :], (C, BN, BS))
    u_low = tl.broadcast_to(u_low[None, :, :], (C, BN, BS))
    TWICE: tl.constexpr = SPLIT and EXACT
    dw_a = _product(tl.trans(v_a, (0, 2, 1)), u_high, u_low, dw_a, TWICE)
    pu = tl.reshape(tl.join(p, u), (BN, 2 * BS)).to(dtype)
    pu = tl.broadcast_to(pu[None, :, :], (C, BN, 2 * BS))
    target = _pointers(table + 2 * N, n, there, dtype)[None, :, None]
    d_a = tl.dot(pu, pairs_a, d_a.to(tl.float32), input_precision="ieee")
    tl.store(target + (row + k_a)[:, None, :], d_a.to(dtype), mask=there[None, :, None] & (k_a < K)[:, None, :])
    if BB > 0:
        dw_b = _product(tl.trans(v_b, (0, 2, 1)), u_high, u_low, dw_b, TWICE)
        d_b = tl.dot(pu, pairs_b, d_b.to(tl.float32), input_precision="ieee")
        inside_d = there[None, :, None] & (k_b < K)[:, None, :]
        tl.store(target + (row + k_b)[:, None, :], d_b.to(dtype), mask=inside_d)
    return dw_a, dw_b


@triton.jit(do_not_specialize=["N", "S", "T", "steps"])
def inter_backward_kernel(
    table, weight, weight_parts, N, S, T, steps, dtype: tl.constexpr, EXACT: tl.constexpr, SUMS: tl.constexpr,
    ONE: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    BN: tl.constexpr, BS: tl.constexpr, C: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    # The table: rows of the sources, of the sums so far, of the gradients; the same of rstd; then for the sites the
    # upstream gradients and queries in turn, the gradients of the log-sum-exps, the log-sum-exps. No sum so far: the
    # source itself in its place; none at all: not SUMS.
    # EXACT: the gradients of the log-sum-exps are not yet those of the normalisers. ONE: N <= BN, so that a token is
    # one stretch of code, in which all its rows are on their way at once.
    SPLIT: tl.constexpr = dtype != tl.float32
    head = tl.program_id(0) % H
    block = tl.program_id(0).to(tl.int64) // H
    site, some = tl.arange(0, BS), tl.arange(0, BN)
    chunk = tl.arange(0, C)[:, None]
    k_a = chunk * BA + tl.arange(0, BA)[None, :]  # [C, BA]
    k_b = C * BA + chunk * BB + tl.arange(0, BB)[None, :] if BB > 0 else k_a
    queries = weight + site[None, None, :] * (H * K) + head * K
    asks = (site < S)[None, None, :]
    low_a = _split(tl.load(queries + k_a[:, :, None], mask=asks & (k_a < K)[:, :, None], other=0.0), dtype)[1]
    dw_a = tl.zeros((C, BA, BS), tl.float32)
    low_b, dw_b = low_a, dw_a
    if BB > 0:
        low_b = _split(tl.load(queries + k_b[:, :, None], mask=asks & (k_b < K)[:, :, None], other=0.0), dtype)[1]
        dw_b = tl.zeros((C, BB, BS), tl.float32)

    # In one stage: several, through shared memory, would leave room for half as many programs.
    for step in tl.range(0, steps, num_stages=1):
        token = block * steps + opaque(step)
        row = token * (H * K) + head * K
        stat = token * H + head
        live = token < T
        mine = (site < S) & live
        pairs_a = _pairs(table, 6 * N, S, k_a, K, BS, live, dtype, H, head, token)
        pairs_b = pairs_a
        if BB > 0:
            pairs_b = _pairs(table, 6 * N, S, k_b, K, BS, live, dtype, H, head, token)
        dz = tl.load(_pointers(table + 6 * N + 2 * S, site, mine, tl.float32) + stat, mask=mine, other=0.0)
        z = tl.load(_pointers(table + 6 * N + 3 * S, site, mine, tl.float32) + stat, mask=mine, other=float("inf"))
        if EXACT and not ONE:
            for first in range(0, N, BN):
                n = first + some
                v_a, v_b, r = _load(table, N, 3 * N, n, live, row, stat, k_a, k_b, K, dtype, BB)
                _, p, dp = _products(v_a, v_b, r, low_a, low_b, pairs_a, pairs_b, z, (n < N) & live, SPLIT, BN, BS, BB)
                dz -= tl.sum(p * dp, 0)
        if ONE:
            dw_a, dw_b = _backward_rows(
                0, table, N, row, stat, live, some, k_a, k_b, low_a, low_b, pairs_a, pairs_b,
                z, dz, dw_a, dw_b, dtype, EXACT, SUMS, ONE, K, BN, BS, C, BA, BB,
            )  # fmt: skip
        else:
            for first in range(0, N, BN):
                dw_a, dw_b = _backward_rows(
                    first, table, N, row, stat, live, some, k_a, k_b, low_a, low_b, pairs_a, pairs_b,
                    z, dz, dw_a, dw_b, dtype, EXACT, SUMS, ONE, K, BN, BS, C, BA, BB,
                )  # fmt: skip
    out = weight_parts + (block * S + site)[None, :, None] * (H * K) + head * K
    asked = (site < S)[None, :, None]
    tl.store(out + k_a[:, None, :], tl.trans(dw_a, (0, 2, 1)), mask=asked & (k_a < K)[:, None, :])
    if BB > 0:
        tl.store(out + k_b[:, None, :], tl.trans(dw_b, (0, 2, 1)), mask=asked & (k_b < K)[:, None, :])


_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def forward(
    sources: Sequence[Tensor], rstd: Sequence[Tensor], weight: Tensor, num_heads: int
) -> tuple[list[Tensor], list[Tensor]]:
    """As `two_phase.algebra.inter_forward`."""
    like, D = sources[0], sources[0].shape[-1]
    partials = [like.new_empty(like.shape) for _ in weight]
    lses = [like.new_empty((*like.shape[:-1], num_heads), dtype=torch.float32) for _ in weight]
    rows, stats, weight = [plain(source) for source in sources], [plain(r) for r in rstd], plain(weight)
    T = like.numel() // D
    tile = inter_tile(len(rows), len(weight), D // num_heads, like.element_size(), "forward")
    programs = min(T, inter_programs(tile, num_heads, "forward"))
    steps = triton.cdiv(T, programs)
    with on_device(like):
        table = pointer_table([*rows, *stats, *partials, *lses])
        arguments = (table, weight, len(rows), len(weight), T, steps)
        constants = (_TYPES[like.dtype], *tile.block(num_heads, D))
        options = {"num_warps": tile.warps, "maxnreg": inter_registers(tile)}
        launch(inter_forward_kernel, triton.cdiv(T, steps) * num_heads, arguments, constants, **options)
    return partials, lses


def backward(
    grads: Sequence[Tensor],
    lse_grads: Sequence[Tensor],
    sources: Sequence[Tensor],
    rstd: Sequence[Tensor],
    weight: Tensor,
    lses: Sequence[Tensor],
    num_heads: int,
    addends: Sequence[Tensor | None] = (),
    rstd_addends: Sequence[Tensor | None] = (),
    exact: bool = False,
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """As `two_phase.algebra.inter_backward`."""
    like, D = sources[0], sources[0].shape[-1]
    source_grads = [like.new_empty(like.shape) for _ in sources]
    rstd_grads = [lses[0].new_empty(lses[0].shape) for _ in sources]
    rows, stats, weight = [plain(source) for source in sources], [plain(r) for r in rstd], plain(weight)
    sums = _in_place_of_none(addends, rows)
    rstd_sums = _in_place_of_none(rstd_addends, stats)
    sites = [[plain(tensor) for tensor in tensors] for tensors in (grads, lse_grads, lses)]
    T = like.numel() // D
    tile = inter_tile(len(rows), len(weight), D // num_heads, like.element_size(), "backward")
    programs = min(T, inter_programs(tile, num_heads, "backward"))
    steps = triton.cdiv(T, programs)
    programs = triton.cdiv(T, steps)
    weight_parts = weight.new_empty((programs, *weight.shape))
    with on_device(like):
        # A row of the queries is aligned as a token's row is.
        pairs = [row for pair in zip(sites[0], weight.to(like.dtype), strict=True) for row in pair]
        table = pointer_table(
            [*rows, *sums, *source_grads, *stats, *rstd_sums, *rstd_grads, *pairs, *sites[1], *sites[2]]
        )
        arguments = (table, weight, weight_parts, len(rows), len(weight), T, steps)
        summed = any(tensor is not None for tensor in (*addends, *rstd_addends))
        constants = (_TYPES[like.dtype], exact, summed, len(rows) <= tile.sources, *tile.block(num_heads, D))
        launch(inter_backward_kernel, programs * num_heads, arguments, constants, num_warps=tile.warps)
        return source_grads, rstd_grads, sum_parts(weight_parts)[0]


def _in_place_of_none(tensors: Sequence[Tensor | None], others: Sequence[Tensor]) -> list[Tensor]:
    if not tensors:
        return list(others)
    return [other if tensor is None else plain(tensor) for tensor, other in zip(tensors, others, strict=True)]
