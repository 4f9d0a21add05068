"""Finished sources read for all sites of a tile at once, in Triton, on tensor cores.

A program reads one token and head after another: values v [sources, channels], queries w [channels, sites]. Two
products forward, v w and v^T p; sites are their narrow side, 8 with 16-bit operands, so nothing is padded. Three
backward, with the upstream gradients and the queries of all sites in turn, g: v g^T, v^T u, and (p, u) g. Channels are
cut into chunks, a warp for each, and the products are batched over them; only logits cross warps. A chunk is a few
equal parts, worked on one after the other: rows, queries and sums are tuples of them.
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
from depthroute.ops.kernels.rows import opaque, zeros
from depthroute.ops.kernels.settings import inter_budget, inter_tile
from depthroute.ops.kernels.sums import sum_parts


@triton.jit
def _pointers(table, n, there, dtype: tl.constexpr):
    """Entries n of a table of addresses, as pointers known to be aligned for vector loads; null where not there."""
    addresses = tl.load(table + n, mask=there, other=0)
    return tl.multiple_of(addresses.to(tl.pointer_type(dtype)), [16])


@triton.jit
def _channels(part: tl.constexpr, C: tl.constexpr, W: tl.constexpr, P: tl.constexpr):
    """Channels of a head in one part of each chunk, [chunks, channels of a part]."""
    return tl.arange(0, C)[:, None] * (P * W) + part * W + tl.arange(0, W)[None, :]


@triton.jit
def _load(pointers, offset, there, K: tl.constexpr, C: tl.constexpr, W: tl.constexpr, P: tl.constexpr):
    """One head's channels of some rows: for each part [chunks, rows, channels]."""
    rows = ()  # type: tuple[tl.tensor, ...]
    for part in tl.static_range(P):
        k = _channels(part, C, W, P)
        inside = there[None, :, None] & (k < K)[:, None, :]
        values = tl.load(pointers[None, :, None] + (offset + k)[:, None, :], mask=inside, other=0.0)
        rows = rows + (values,)  # noqa: RUF005
    return rows


@triton.jit
def _sources(
    table, N, at_rstd, n, there, token, head, dtype: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, C: tl.constexpr, W: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Rows n of one token and head, and their rstd [rows]."""
    rows = _load(_pointers(table, n, there, dtype), token * (H * K) + head * K, there, K, C, W, P)
    r = tl.load(_pointers(table + at_rstd, n, there, tl.float32) + token * H + head, mask=there, other=0.0)
    return rows, r


@triton.jit
def _split(x, dtype: tl.constexpr):
    """x in fp32 as a high and a low part of a narrower type."""
    high = x.to(dtype)
    return high, (x - high.to(tl.float32)).to(dtype)


@triton.jit
def _queries(
    weight, S, head, dtype: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, BS: tl.constexpr, C: tl.constexpr, W: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """High and low parts of the queries of all sites, for each part [chunks, channels, sites]."""
    site = tl.arange(0, BS)[None, None, :]
    highs, lows = (), ()  # type: tuple[tl.tensor, ...], tuple[tl.tensor, ...]
    for part in tl.static_range(P):
        k = _channels(part, C, W, P)[:, :, None]
        query = tl.load(weight + site * (H * K) + head * K + k, mask=(site < S) & (k < K), other=0.0)
        high, low = _split(query, dtype)
        highs, lows = highs + (high,), lows + (low,)  # noqa: RUF005
    return highs, lows


@triton.jit
def _add_mix(total, decay, rows, p, C: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr):
    """total * decay + rows^T p, for each part [chunks, channels, sites]."""
    p = tl.broadcast_to(p[None, :, :], (C, BN, BS))
    out = ()  # type: tuple[tl.tensor, ...]
    for i in tl.static_range(len(rows)):
        scaled = total[i] * decay[None, None, :]
        out = out + (tl.dot(tl.trans(rows[i], (0, 2, 1)), p, scaled, input_precision="ieee"),)  # noqa: RUF005
    return out


@triton.jit(do_not_specialize=["N", "S", "T", "steps"])
def inter_forward_kernel(
    table, weight, N, S, T, steps, dtype: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    BN: tl.constexpr, BS: tl.constexpr, C: tl.constexpr, W: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) % H
    block = tl.program_id(0).to(tl.int64) // H
    site, some = tl.arange(0, BS), tl.arange(0, BN)
    w, low = _queries(weight, S, head, dtype, H, K, BS, C, W, P)

    # The next rows are on their way meanwhile: of this token, or the first ones of the token after it.
    first_there = (some < N) & (block * steps < T)
    next_v, next_r = _sources(table, N, N, some, first_there, block * steps, head, dtype, H, K, C, W, P)
    for step in range(steps):
        token = block * steps + opaque(step)
        live = token < T
        top = tl.full((BS,), float("-inf"), tl.float32)
        total = tl.zeros((BS,), tl.float32)
        rounded = tl.zeros((BS,), tl.float32)  # the sum of the weights as the products take them
        acc = zeros(C, W, BS, P)
        for first in range(0, N, BN):
            there = (first + some < N) & live
            v, r = next_v, next_r
            last = first + BN >= N
            n, then = tl.where(last, 0, first + BN) + some, token + last
            next_v, next_r = _sources(table, N, N, n, (n < N) & (then < T), then, head, dtype, H, K, C, W, P)
            raw = tl.zeros((C, BN, BS), tl.float32)
            for i in tl.static_range(P):
                raw = tl.dot(v[i], w[i], raw, input_precision="ieee")
                if dtype != tl.float32:
                    raw = tl.dot(v[i], low[i], raw, input_precision="ieee")
            logits = tl.where(there[:, None], tl.sum(raw, 0) * r[:, None], float("-inf"))  # [BN, BS]
            new_top = tl.maximum(top, tl.max(logits, 0))
            new_top = tl.where(live, new_top, 0.0)  # a token past the end has no logits
            decay = tl.exp(top - new_top)
            p = tl.exp(logits - new_top[None, :])
            total = total * decay + tl.sum(p, 0)
            p = p.to(dtype)
            rounded = rounded * decay + tl.sum(p.to(tl.float32), 0)
            top = new_top
            acc = _add_mix(acc, decay, v, p, C, BN, BS)
        written = (site < S) & live
        lse = _pointers(table + 2 * N + S, site, written, tl.float32)
        tl.store(lse + token * H + head, top + tl.log(total), mask=written)
        partial = _pointers(table + 2 * N, site, written, dtype)[None, :, None]
        whole = 1 / rounded
        for i in tl.static_range(P):
            k = _channels(i, C, W, P)
            mix = tl.trans(acc[i] * whole[None, None, :], (0, 2, 1)).to(dtype)
            at = (token * (H * K) + head * K + k)[:, None, :]
            tl.store(partial + at, mix, mask=written[None, :, None] & (k < K)[:, None, :])


@triton.jit
def _pairs(
    table, at, S, live, token, head, dtype: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, BS: tl.constexpr, C: tl.constexpr, W: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """For each part [C, 2 BS, W]: a site's upstream gradient, its query as rounded, then those of the next site."""
    row = tl.arange(0, 2 * BS)
    is_query = row % 2 == 1
    there = (row < 2 * S) & (live | is_query)
    pointers = _pointers(table + at, row, there, dtype) + tl.where(is_query, 0, token * (H * K)) + head * K
    return _load(pointers, 0, there, K, C, W, P)


@triton.jit
def _sums(table, N, at_other, at, n, there, dtype: tl.constexpr):
    """Pointers to the sums so far, in place n of the table's part `at`, and which of them there are."""
    addresses = tl.load(table + at + n, mask=there, other=0)
    others = tl.load(table + at_other + n, mask=there, other=0)
    return tl.multiple_of(addresses.to(tl.pointer_type(dtype)), [16]), there & (addresses != others)


@triton.jit
def _products(v, r, low, pairs, z, there, dtype: tl.constexpr, C: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr):
    """<source, query>, weight and <upstream gradient, source> of some sources, each [BN, BS]."""
    both = tl.zeros((C, BN, 2 * BS), tl.float32)
    for i in tl.static_range(len(v)):
        both = tl.dot(v[i], tl.trans(pairs[i], (0, 2, 1)), both, input_precision="ieee")
    dp, raw = tl.split(tl.reshape(tl.sum(both, 0), (BN, BS, 2)))
    if dtype != tl.float32:
        rest = tl.zeros((C, BN, BS), tl.float32)
        for i in tl.static_range(len(v)):
            rest = tl.dot(v[i], low[i], rest, input_precision="ieee")
        raw += tl.sum(rest, 0)
    p = tl.where(there[:, None], tl.exp(raw * r[:, None] - z[None, :]), 0.0)
    return raw, p, dp


@triton.jit
def _add_weight_grads(total, v, high, low, TWICE: tl.constexpr):
    """total + v^T (high + low), for each part [chunks, channels, sites]."""
    out = ()  # type: tuple[tl.tensor, ...]
    for i in tl.static_range(len(v)):
        turned = tl.trans(v[i], (0, 2, 1))
        grad = tl.dot(turned, high, total[i], input_precision="ieee")
        if TWICE:
            grad = tl.dot(turned, low, grad, input_precision="ieee")
        out = out + (grad,)  # noqa: RUF005
    return out


@triton.jit
def _backward_rows(
    first, table, N, token, head, live, low, pairs, z, dz, dw,
    dtype: tl.constexpr, EXACT: tl.constexpr, SUMS: tl.constexpr, ONE: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    BN: tl.constexpr, BS: tl.constexpr, C: tl.constexpr, W: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Gradients of the rows from `first` on of one token and head, stored; returns the weights', with theirs added."""
    n = first + tl.arange(0, BN)
    there = (n < N) & live
    row, stat = token * (H * K) + head * K, token * H + head
    v, r = _sources(table, N, 3 * N, n, there, token, head, dtype, H, K, C, W, P)
    if SUMS:
        sums, summed = _sums(table, N, 0, N, n, there, dtype)
        r_sums, r_summed = _sums(table, N, 3 * N, 4 * N, n, there, tl.float32)
        so_far = _load(sums, row, summed, K, C, W, P)
        r_sum = tl.load(r_sums + stat, mask=r_summed, other=0.0)
    raw, p, dp = _products(v, r, low, pairs, z, there, dtype, C, BN, BS)
    if EXACT and ONE:
        dp -= tl.sum(p * dp, 0)[None, :]
    dl = p * (dp + dz[None, :])
    u = dl * r[:, None]

    dr = tl.sum(dl * raw, 1)
    if SUMS:
        dr += r_sum
    tl.store(_pointers(table + 5 * N, n, there, tl.float32) + stat, dr, mask=there)

    high, rest = _split(u, dtype)
    high = tl.broadcast_to(high[None, :, :], (C, BN, BS))
    rest = tl.broadcast_to(rest[None, :, :], (C, BN, BS))
    dw = _add_weight_grads(dw, v, high, rest, EXACT and dtype != tl.float32)
    pu = tl.reshape(tl.join(p, u), (BN, 2 * BS)).to(dtype)
    pu = tl.broadcast_to(pu[None, :, :], (C, BN, 2 * BS))
    target = _pointers(table + 2 * N, n, there, dtype)[None, :, None]
    for i in tl.static_range(P):
        if SUMS:
            d = tl.dot(pu, pairs[i], so_far[i].to(tl.float32), input_precision="ieee")
        else:
            d = tl.dot(pu, pairs[i], input_precision="ieee")
        k = _channels(i, C, W, P)
        tl.store(target + (row + k)[:, None, :], d.to(dtype), mask=there[None, :, None] & (k < K)[:, None, :])
    return dw


@triton.jit(do_not_specialize=["N", "S", "T", "steps"])
def inter_backward_kernel(
    table, weight, weight_parts, N, S, T, steps, dtype: tl.constexpr, EXACT: tl.constexpr, SUMS: tl.constexpr,
    ONE: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    BN: tl.constexpr, BS: tl.constexpr, C: tl.constexpr, W: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    # The table: rows of the sources, of the sums so far, of the gradients; the same of rstd; then for the sites the
    # upstream gradients and queries in turn, the gradients of the log-sum-exps, the log-sum-exps. No sum so far: the
    # source itself in its place; none at all: not SUMS.
    # EXACT: the gradients of the log-sum-exps are not yet those of the normalisers. ONE: N <= BN, so that a token is
    # one stretch of code, in which all its rows are on their way at once.
    head = tl.program_id(0) % H
    block = tl.program_id(0).to(tl.int64) // H
    site, some = tl.arange(0, BS), tl.arange(0, BN)
    low = _queries(weight, S, head, dtype, H, K, BS, C, W, P)[1]
    dw = zeros(C, W, BS, P)

    # In one stage: several, through shared memory, would leave room for half as many programs.
    for step in tl.range(0, steps, num_stages=1):
        token = block * steps + opaque(step)
        stat = token * H + head
        live = token < T
        mine = (site < S) & live
        pairs = _pairs(table, 6 * N, S, live, token, head, dtype, H, K, BS, C, W, P)
        dz = tl.load(_pointers(table + 6 * N + 2 * S, site, mine, tl.float32) + stat, mask=mine, other=0.0)
        z = tl.load(_pointers(table + 6 * N + 3 * S, site, mine, tl.float32) + stat, mask=mine, other=float("inf"))
        if EXACT and not ONE:
            for first in range(0, N, BN):
                n = first + some
                there = (n < N) & live
                v, r = _sources(table, N, 3 * N, n, there, token, head, dtype, H, K, C, W, P)
                _, p, dp = _products(v, r, low, pairs, z, there, dtype, C, BN, BS)
                dz -= tl.sum(p * dp, 0)
        if ONE:
            dw = _backward_rows(
                0, table, N, token, head, live, low, pairs, z, dz, dw,
                dtype, EXACT, SUMS, ONE, H, K, BN, BS, C, W, P,
            )  # fmt: skip
        else:
            for first in range(0, N, BN):
                dw = _backward_rows(
                    first, table, N, token, head, live, low, pairs, z, dz, dw,
                    dtype, EXACT, SUMS, ONE, H, K, BN, BS, C, W, P,
                )  # fmt: skip
    out = weight_parts + (block * S + site)[None, :, None] * (H * K) + head * K
    for i in tl.static_range(P):
        k = _channels(i, C, W, P)
        tl.store(out + k[:, None, :], tl.trans(dw[i], (0, 2, 1)), mask=(site < S)[None, :, None] & (k < K)[:, None, :])


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
    registers, programs = inter_budget(tile, num_heads, "forward")
    steps = triton.cdiv(T, min(T, programs))
    with on_device(like):
        table = pointer_table([*rows, *stats, *partials, *lses])
        arguments = (table, weight, len(rows), len(weight), T, steps)
        constants = (_TYPES[like.dtype], *tile.block(num_heads, D))
        options = {"num_warps": tile.warps, "maxnreg": registers}
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
    phase = "exact" if exact else "backward"
    tile = inter_tile(len(rows), len(weight), D // num_heads, like.element_size(), phase)
    registers, programs = inter_budget(tile, num_heads, phase)
    steps = triton.cdiv(T, min(T, programs))
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
        options = {"num_warps": tile.warps, "maxnreg": registers}
        launch(inter_backward_kernel, programs * num_heads, arguments, constants, **options)
        return source_grads, rstd_grads, sum_parts(weight_parts)[0]


def _in_place_of_none(tensors: Sequence[Tensor | None], others: Sequence[Tensor]) -> list[Tensor]:
    if not tensors:
        return list(others)
    return [other if tensor is None else plain(tensor) for tensor, other in zip(tensors, others, strict=True)]
