"""Finished sources read for all sites of a tile at once, in Triton, on tensor cores.

A program reads one token and head after another: values v [sources, channels], queries w [channels, sites]. Two
products forward, v w and v^T p; sites are their narrow side, 8 with 16-bit operands, so nothing is padded. Three
backward, with the upstream gradients and the queries of all sites, g: v g^T, v^T u, and (p, u) g. Channels are cut into
chunks, a warp for each, and the products are batched over them; only logits cross warps. A chunk is a few equal parts,
worked on one after the other: rows, queries and sums are tuples of them.

The order of the channels in a product is free. Here it is the one in which each lane of a warp has a run of 8 of a
row, 16 bytes in memory: a load is an operand as it comes, and the gradient of a source is stored as its product leaves
it. Only what a product needs the other way round, the sources for the weights' gradients and the upstream gradients
for those of the sources, passes shared memory, once. All loads of a block of sources are issued before anything waits.

Rows of D values for N sources, S sites and each token: forward N read and S written; backward N + S read, N written,
and N more read where sums so far come in. Busiest is the first-level cache, which rows, operands from shared memory
and small numbers all pass (docs/operator.md).

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

from depthroute.ops.kernels.launch import cdiv, contiguous_like, launch, on_device, plain, pointer_table
from depthroute.ops.kernels.octets import (
    arrived,
    as_octets,
    channels,
    dealt,
    gathered,
    high_and_low,
    load_octets,
    octet_channels,
    octet_rows,
    octets_at,
    pointers_at,
    turned_round,
)
from depthroute.ops.kernels.rows import opaque, store_factor, zeros
from depthroute.ops.kernels.settings import inter_budget, inter_tile
from depthroute.ops.kernels.sums import sum_parts


@triton.jit
def _sources(
    table, N, at_rstd, first, token, head, dtype: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    BN: tl.constexpr, C: tl.constexpr, W: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Rows from `first` on of one token and head, and their rstd [rows]."""
    octets = first + octet_rows(BN)
    row_there = octets < N
    rows = load_octets(octets_at(table, octets, row_there, dtype), token * (H * K) + head * K, row_there, K, C, W, P)
    n = first + tl.arange(0, BN)
    there = n < N
    r = tl.load(pointers_at(table + at_rstd, n, there, tl.float32) + (token * H + head), mask=there, other=0.0)
    return rows, r


@triton.jit
def _pairs(
    table, at, S, token, head, dtype: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, BS: tl.constexpr, C: tl.constexpr, W: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """For each part [C, 2 BS, W]: the upstream gradients of all sites, then their queries as rounded."""
    row = octet_rows(2 * BS)
    is_query = row >= BS
    row -= tl.where(is_query, BS - S, 0)
    there = row < tl.where(is_query, 2 * S, S)
    pointers = octets_at(table + at, row, there, dtype)
    return load_octets(pointers, tl.where(is_query, 0, token * (H * K)) + head * K, there, K, C, W, P)


@triton.jit
def _queries(
    weight, S, head, dtype: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, BS: tl.constexpr, C: tl.constexpr, W: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """High and low parts of the queries of all sites, dealt: for each part [C, W, BS]."""
    site = tl.arange(0, BS)[None, None, :]
    k = tl.arange(0, W)
    if dtype != tl.float32:
        k = (k // 2 % 4) * (W // 4) + k // 8 * 2 + k % 2
    k = tl.arange(0, C)[:, None, None] * (P * W) + k[None, :, None]
    highs, lows = (), ()  # type: tuple[tl.tensor, ...], tuple[tl.tensor, ...]
    for part in tl.static_range(P):
        inside = (site < S) & (part * W + k < K)
        query = tl.load(weight + site * (H * K) + head * K + part * W + k, mask=inside, other=0.0)
        high, low = high_and_low(query, dtype)
        highs, lows = highs + (high,), lows + (low,)  # noqa: RUF005
    return highs, lows


@triton.jit
def _over_chunks(x):
    """The sum over chunks, [rows, sites].

    A plain sum over warps would go through shared memory with the warp as the innermost dimension, in the same bank
    for all lanes. Gathered (each where it is), the chunks come into lanes of one warp first, with no conflict.
    """
    if x.shape[0] > 1:
        chunk = tl.broadcast_to(tl.arange(0, x.shape[0])[:, None, None], x.shape)
        x = tl.gather(x, chunk, 0)
    return tl.sum(x, 0)


@triton.jit
def _products(v, r, low, pairs, z, there, dtype: tl.constexpr, C: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr):
    """<source, query>, weight and <upstream gradient, source> of some sources, each [BN, BS]."""
    both = tl.zeros((C, BN, 2 * BS), tl.float32)
    rest = tl.zeros((C, BN, BS), tl.float32)
    for i in tl.static_range(len(v)):
        x = dealt(v[i], dtype)
        both = tl.dot(x, tl.trans(dealt(pairs[i], dtype), (0, 2, 1)), both, input_precision="ieee")
        if dtype != tl.float32:
            rest = tl.dot(x, low[i], rest, input_precision="ieee")
    dp, raw = tl.split(tl.trans(tl.reshape(both, (C, BN, 2, BS)), (0, 1, 3, 2)))
    both = tl.reshape(tl.trans(tl.join(dp, raw + rest), (0, 1, 3, 2)), (C, BN, 2 * BS))
    dp, raw = tl.split(tl.trans(tl.reshape(_over_chunks(both), (BN, 2, BS)), (0, 2, 1)))
    p = tl.where(there[:, None], tl.exp(raw * r[:, None] - z[None, :]), 0.0)
    return raw, p, dp


@triton.jit
def _sums(table, N, at_other, at, n, there, dtype: tl.constexpr):
    """Pointers to the sums so far, in place n of the table's part `at`, and which of them there are."""
    addresses = tl.load(table + at + n, mask=there, other=0)
    others = tl.load(table + at_other + n, mask=there, other=0)
    return tl.multiple_of(addresses.to(tl.pointer_type(dtype)), [16]), there & (addresses != others)


@triton.jit(do_not_specialize=["N", "S", "T", "steps"])
def inter_forward_kernel(
    table, weight, N, S, T, steps, dtype: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    BN: tl.constexpr, BS: tl.constexpr, C: tl.constexpr, W: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    # The table: rows of the sources, their rstd; then for the sites the partial mixes, the log-sum-exps.
    head = tl.program_id(0) % H
    first_token = tl.program_id(0).to(tl.int64) // H * steps
    steps = tl.minimum(steps, T - first_token).to(tl.int32)
    site, some = tl.arange(0, BS), tl.arange(0, BN)
    high, low = _queries(weight, S, head, dtype, H, K, BS, C, W, P)
    for step in tl.range(0, steps, num_stages=1):
        token = first_token + opaque(step)
        top = tl.full((BS,), float("-inf"), tl.float32)
        total = tl.zeros((BS,), tl.float32)
        rounded = tl.zeros((BS,), tl.float32)  # the sum of the weights as the products take them
        acc = zeros(C, W, BS, P)
        for first in tl.range(0, N, BN, num_stages=1):
            there = first + some < N
            v, r = _sources(table, N, N, first, token, head, dtype, H, K, BN, C, W, P)
            v = arrived(v)
            turned = turned_round(v)
            raw = tl.zeros((C, BN, BS), tl.float32)
            for i in tl.static_range(P):
                x = dealt(v[i], dtype)
                raw = tl.dot(x, high[i], raw, input_precision="ieee")
                if dtype != tl.float32:
                    raw = tl.dot(x, low[i], raw, input_precision="ieee")
            logits = tl.where(there[:, None], tl.sum(raw, 0) * r[:, None], float("-inf"))  # [BN, BS]
            new_top = tl.maximum(top, tl.max(logits, 0))
            decay = tl.exp(top - new_top)
            p = tl.exp(logits - new_top[None, :])
            total = total * decay + tl.sum(p, 0)
            p = p.to(dtype)
            rounded = rounded * decay + tl.sum(p.to(tl.float32), 0)
            top = new_top
            p = tl.broadcast_to(p[None, :, :], (C, BN, BS))
            added = ()  # type: tuple[tl.tensor, ...]
            for i in tl.static_range(P):
                scaled = acc[i] * decay[None, None, :]
                added = added + (tl.dot(turned[i], p, scaled, input_precision="ieee"),)  # noqa: RUF005
            acc = added
        written = site < S
        lse = pointers_at(table + 2 * N + S, site, written, tl.float32)
        tl.store(lse + (token * H + head), top + tl.log(total), mask=written)
        octets = octet_rows(BS)
        row_written = octets < S
        partial = octets_at(table + 2 * N, octets, row_written, dtype)
        whole = 1 / rounded
        mixes = ()  # type: tuple[tl.tensor, ...]
        for i in tl.static_range(P):
            mixes = mixes + (tl.trans(acc[i] * whole[None, None, :], (0, 2, 1)).to(dtype),)  # noqa: RUF005
        for i in tl.static_range(P):
            k = octet_channels(i, C, W, P)
            tl.store(partial + (token * (H * K) + head * K + k), as_octets(mixes[i]), mask=row_written & (k < K))


@triton.jit(do_not_specialize=["N", "S", "T", "steps"])
def inter_backward_kernel(
    table, weight, weight_parts, N, S, T, steps, dtype: tl.constexpr, EXACT: tl.constexpr, SUMS: tl.constexpr,
    RSTD_SUMS: tl.constexpr, ONE: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
    BN: tl.constexpr, BS: tl.constexpr, C: tl.constexpr, W: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    # The table: rows of the sources, of the sums so far, of the gradients; the same of rstd; then for the sites the
    # upstream gradients, the queries as rounded, the gradients of the log-sum-exps, the log-sum-exps. No sum so far:
    # the source itself in its place; none at all: not SUMS.
    # EXACT: the gradients of the log-sum-exps are not yet those of the normalisers. ONE: N <= BN.
    head = tl.program_id(0) % H
    block = tl.program_id(0).to(tl.int64) // H
    first_token = block * steps
    steps = tl.minimum(steps, tl.maximum(T - first_token, 0)).to(tl.int32)  # past the end a program leaves zeros
    site, some = tl.arange(0, BS), tl.arange(0, BN)
    dw = zeros(C, W, BS, P)
    low = _queries(weight, S, head, dtype, H, K, BS, C, W, P)[1]
    for step in tl.range(0, steps, num_stages=1):
        token = first_token + opaque(step)
        row, stat = token * (H * K) + head * K, token * H + head
        mine = site < S
        pairs = _pairs(table, 6 * N, S, token, head, dtype, H, K, BS, C, W, P)
        dz = tl.load(pointers_at(table + 6 * N + 2 * S, site, mine, tl.float32) + stat, mask=mine, other=0.0)
        z = tl.load(pointers_at(table + 6 * N + 3 * S, site, mine, tl.float32) + stat, mask=mine, other=float("inf"))
        if EXACT and not ONE:
            for first in tl.range(0, N, BN, num_stages=1):
                there = first + some < N
                v, r = _sources(table, N, 3 * N, first, token, head, dtype, H, K, BN, C, W, P)
                _, p, dp = _products(arrived(v), r, low, arrived(pairs), z, there, dtype, C, BN, BS)
                dz -= tl.sum(p * dp, 0)
        for first in tl.range(0, N, BN, num_stages=1):
            n, octets = first + some, first + octet_rows(BN)
            there, row_there = n < N, octets < N
            v, r = _sources(table, N, 3 * N, first, token, head, dtype, H, K, BN, C, W, P)
            if SUMS:
                sums = tl.load(table + N + octets, mask=row_there, other=0)
                summed = row_there & (sums != tl.load(table + octets, mask=row_there, other=0))
                sums = octets_at(table + N, octets, summed, dtype)
                so_far = load_octets(sums, row, summed, K, C, W, P)
            if RSTD_SUMS:
                r_sums, r_summed = _sums(table, N, 3 * N, 4 * N, n, there, tl.float32)
                r_sum = tl.load(r_sums + stat, mask=r_summed, other=0.0)
            target = octets_at(table + 2 * N, octets, row_there, dtype)
            r_target = pointers_at(table + 5 * N, n, there, tl.float32)

            v, g = arrived(v), arrived(pairs)
            turned = turned_round(v)
            raw, p, dp = _products(v, r, low, g, z, there, dtype, C, BN, BS)
            if EXACT and ONE:
                dp -= tl.sum(p * dp, 0)[None, :]
            dl = p * (dp + dz[None, :])
            u = dl * r[:, None]
            dr = tl.sum(dl * raw, 1)
            if RSTD_SUMS:
                dr += r_sum
            store_factor(r_target + stat, dr, there)

            pu = tl.reshape(tl.trans(tl.join(p, u), (0, 2, 1)), (BN, 2 * BS)).to(dtype)
            pu = tl.broadcast_to(pu[None, :, :], (C, BN, 2 * BS))
            for i in tl.static_range(P):
                if SUMS:
                    d = tl.dot(pu, dealt(g[i], dtype), dealt(so_far[i], dtype).to(tl.float32), input_precision="ieee")
                else:
                    d = tl.dot(pu, dealt(g[i], dtype), input_precision="ieee")
                d = as_octets(gathered(d.to(dtype), dtype))
                k = octet_channels(i, C, W, P)
                tl.store(target + (row + k), d, mask=row_there & (k < K))

            high, rest = high_and_low(u, dtype)
            high = tl.broadcast_to(high[None, :, :], (C, BN, BS))
            rest = tl.broadcast_to(rest[None, :, :], (C, BN, BS))
            added = ()  # type: tuple[tl.tensor, ...]
            for i in tl.static_range(P):
                grad = tl.dot(turned[i], high, dw[i], input_precision="ieee")
                if EXACT and dtype != tl.float32:
                    grad = tl.dot(turned[i], rest, grad, input_precision="ieee")
                added = added + (grad,)  # noqa: RUF005
            dw = added
    out = weight_parts + (block * S + site)[None, :, None] * (H * K) + head * K
    for i in tl.static_range(P):
        k = channels(i, C, W, P)
        tl.store(out + k[:, None, :], tl.trans(dw[i], (0, 2, 1)), mask=(site < S)[None, :, None] & (k < K)[:, None, :])


_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def forward(
    sources: Sequence[Tensor], rstd: Sequence[Tensor], weight: Tensor, num_heads: int
) -> tuple[list[Tensor], list[Tensor]]:
    """As `two_phase.algebra.inter_forward`."""
    like, D = sources[0], sources[0].shape[-1]
    partials = [contiguous_like(like) for _ in range(len(weight))]
    lses = [like.new_empty((*like.shape[:-1], num_heads), dtype=torch.float32) for _ in range(len(weight))]
    rows, stats, weight = [plain(source) for source in sources], [plain(r) for r in rstd], plain(weight)
    T = like.numel() // D
    tile = inter_tile(len(weight), D // num_heads, like.element_size(), "forward")
    registers, programs = inter_budget(tile, num_heads, like.element_size(), "forward")
    steps = cdiv(T, min(T, programs))
    with on_device(like):
        table = pointer_table([*rows, *stats, *partials, *lses])
        arguments = (table, weight, len(rows), len(weight), T, steps)
        constants = (_TYPES[like.dtype], *tile.block(num_heads, D))
        options = {"num_warps": tile.warps, "maxnreg": registers}
        launch(inter_forward_kernel, cdiv(T, steps) * num_heads, arguments, constants, **options)
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
    parts: int | None = None,
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """As `two_phase.algebra.inter_backward`."""
    like, D = sources[0], sources[0].shape[-1]
    source_grads = [contiguous_like(like) for _ in sources]
    rstd_grads = [contiguous_like(lses[0]) for _ in sources]
    rows, stats, weight = [plain(source) for source in sources], [plain(r) for r in rstd], plain(weight)
    sums = _in_place_of_none(addends, rows)
    rstd_sums = _in_place_of_none(rstd_addends, stats)
    sites = [[plain(tensor) for tensor in tensors] for tensors in (grads, lse_grads, lses)]
    T = like.numel() // D
    tile = inter_tile(len(weight), D // num_heads, like.element_size(), "backward")
    registers, programs = inter_budget(tile, num_heads, like.element_size(), "backward")
    steps = cdiv(T, min(T, programs, parts or programs))
    programs = parts or cdiv(T, steps)
    weight_parts = weight.new_empty((programs, *weight.shape))
    with on_device(like):
        # A row of the queries is aligned as a token's row is.
        queries = weight if weight.dtype == like.dtype else torch.empty_like(weight, dtype=like.dtype)
        table = pointer_table(
            [*rows, *sums, *source_grads, *stats, *rstd_sums, *rstd_grads, *sites[0], *queries, *sites[1], *sites[2]],
            rounded=None if queries is weight else (weight, queries),
        )
        arguments = (table, weight, weight_parts, len(rows), len(weight), T, steps)
        summed, rstd_summed = (any(tensor is not None for tensor in tensors) for tensors in (addends, rstd_addends))
        flags = (exact, summed, rstd_summed, exact and len(rows) <= tile.sources)
        constants = (_TYPES[like.dtype], *flags, *tile.block(num_heads, D))
        options = {"num_warps": tile.warps, "maxnreg": registers}
        launch(inter_backward_kernel, programs * num_heads, arguments, constants, **options)
        return source_grads, rstd_grads, sum_parts(weight_parts) if parts is None else weight_parts


def _in_place_of_none(tensors: Sequence[Tensor | None], others: Sequence[Tensor]) -> list[Tensor]:
    if not tensors:
        return list(others)
    return [other if tensor is None else plain(tensor) for tensor, other in zip(tensors, others, strict=True)]
