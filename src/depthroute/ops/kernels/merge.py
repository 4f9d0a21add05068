"""One site of a tile in Triton: a partial mix and the few sources born in the tile, and the RMSNorm that may follow.

A program holds whole rows, all heads. Rows of D values, for M sources and each token:
forward 1 (partial) + M, and 1 written; backward 2 (gradient, partial) + M + the sums so far of M - 1 sources, and M + 1
written. The backward passes over the sources twice, to make the mix again and then for their gradients; the second
pass is out of a cache, and neither makes the inner products <w, s> again, which the forward keeps. Bound by memory;
between the sites of a tile most sources stay in the L2 cache.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthroute.ops.kernels.launch import launch, on_device, plain
from depthroute.ops.kernels.rows import column, dot, load, mask_of, opaque, square, store
from depthroute.ops.kernels.settings import merge_tile, parts
from depthroute.ops.kernels.sums import sum_parts

# Addresses travel as arguments: a table in memory would cost a launch for every site. The lists are padded, and the
# number of sources below their end is a run-time value, so only a few variants are ever compiled.
SLOTS = (2, 4, 8, 16)


@triton.jit
def _at(address, dtype: tl.constexpr):
    """An address argument as a pointer that is known to be aligned for vector loads."""
    return tl.multiple_of(tl.cast(address, tl.int64).to(tl.pointer_type(dtype)), 16)


@triton.jit(do_not_specialize=["M", "T", "has_partial"])
def merge_forward_kernel(
    sources, rstds, partial, lse_in, weight, gamma, out, lse, newest, raws, M, T, has_partial, eps, norm_eps,
    H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out.dtype.element_ty
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    head = tl.arange(0, BH)
    live = token < T
    stat = token[:, None] * H + head[None, :]
    live_stat = live[:, None] & (head < H)[None, :]
    at = column(token, H, K, BH, BA, BB)
    inside = mask_of(live, H, K, BH, BA, BB)
    only_column = column(tl.zeros((1,), tl.int64), H, K, BH, BA, BB)
    w = load(weight, only_column, mask_of(tl.full((1,), 1, tl.int1), H, K, BH, BA, BB), BB)

    # The newest source comes first. Slots from M on are masked: a logit of -inf, no traffic.
    values = ()  # type: tuple[tl.tensor, ...]
    for i in tl.static_range(len(sources)):
        values = values + (load(_at(sources[i], dtype), at, mask_of(live & (i < M), H, K, BH, BA, BB), BB),)  # noqa: RUF005
    has = live & (has_partial != 0)
    mixed = load(partial, at, mask_of(has, H, K, BH, BA, BB), BB)
    z = tl.load(lse_in + stat, mask=live_stat & (has_partial != 0), other=float("-inf"))

    rstd = tl.rsqrt(square(values[0], BB) / (H * K) + eps)  # [BT]
    tl.store(newest + stat, tl.broadcast_to(rstd[:, None], (BT, BH)), mask=live_stat)
    raw = dot(values[0], w, BB)  # [BT, BH]
    tl.store(raws + stat, raw, mask=live_stat)
    logit = raw * rstd[:, None]
    top = tl.maximum(z, logit)
    logits = (logit,)  # type: tuple[tl.tensor, ...]
    for i in tl.static_range(1, len(sources)):
        r = tl.load(_at(rstds[i - 1], tl.float32) + stat, mask=live_stat & (i < M), other=0.0)
        raw = dot(values[i], w, BB)
        tl.store(raws + i * tl.cast(T, tl.int64) * H + stat, raw, mask=live_stat & (i < M))
        logit = tl.where(i < M, raw * r, float("-inf"))
        top = tl.maximum(top, logit)
        logits = logits + (logit,)  # noqa: RUF005
    p = tl.exp(z - top)
    total = p
    acc_a = p[:, :, None] * mixed[0].to(tl.float32)
    acc_b = p[:, :, None] * mixed[1].to(tl.float32)
    for i in tl.static_range(len(sources)):
        p = tl.exp(logits[i] - top)
        total += p
        acc_a += p[:, :, None] * values[i][0].to(tl.float32)
        if BB > 0:
            acc_b += p[:, :, None] * values[i][1].to(tl.float32)
    mix = ((acc_a / total[:, :, None]).to(dtype), (acc_b / total[:, :, None]).to(dtype))
    tl.store(lse + stat, top + tl.log(total), mask=live_stat)
    if NORM:
        rho = tl.rsqrt(square(mix, BB) / (H * K) + norm_eps)[:, None, None]
        g = load(gamma, only_column, mask_of(tl.full((1,), 1, tl.int1), H, K, BH, BA, BB), BB)
        # Rounded as the norm module rounds: to the type of the mix before the weight comes in.
        normed_a = (mix[0].to(tl.float32) * rho).to(dtype).to(tl.float32) * g[0].to(tl.float32)
        normed_b = (mix[1].to(tl.float32) * rho).to(dtype).to(tl.float32) * g[1].to(tl.float32)
        mix = (normed_a.to(dtype), normed_b.to(dtype))
    store(out, at, mix, inside, BB)


@triton.jit(do_not_specialize=["M", "T", "steps", "has_partial", "has_rstd_grad", "has_sums", "has_rstd_sums"])
def merge_backward_kernel(
    sources, rstds, sums, rstd_sums, source_grads, rstd_grads,
    grad, rstd_grad, partial, lse_in, lse, newest, raws, weight, gamma,
    partial_grad, normaliser_grad, weight_parts,
    M, T, steps, has_partial, has_rstd_grad, has_sums, has_rstd_sums, norm_eps,
    H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr,
    NORM: tl.constexpr, SUMS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = grad.dtype.element_ty
    D: tl.constexpr = H * K
    program = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BH)
    only_column = column(tl.zeros((1,), tl.int64), H, K, BH, BA, BB)
    only_inside = mask_of(tl.full((1,), 1, tl.int1), H, K, BH, BA, BB)
    w = load(weight, only_column, only_inside, BB)
    dw_a = tl.zeros((BT, BH, BA), tl.float32)
    dw_b = dw_a if BB == 0 else tl.zeros((BT, BH, BB), tl.float32)
    if NORM:
        gm = load(gamma, only_column, only_inside, BB)
        dgamma_a = tl.zeros((BT, BH, BA), tl.float32)
        dgamma_b = dgamma_a if BB == 0 else tl.zeros((BT, BH, BB), tl.float32)
    for step in range(steps):
        token = (program * steps + opaque(step)) * BT + tl.arange(0, BT)
        live = token < T
        stat = token[:, None] * H + head[None, :]
        live_stat = live[:, None] & (head < H)[None, :]
        at = column(token, H, K, BH, BA, BB)
        inside = mask_of(live, H, K, BH, BA, BB)

        upstream = load(grad, at, inside, BB)
        has = live & (has_partial != 0)
        mixed = load(partial, at, mask_of(has, H, K, BH, BA, BB), BB)
        z = tl.load(lse + stat, mask=live_stat, other=0.0)
        p_in = tl.exp(tl.load(lse_in + stat, mask=live_stat & (has_partial != 0), other=float("-inf")) - z)
        m_a = p_in[:, :, None] * mixed[0].to(tl.float32)
        m_b = p_in[:, :, None] * mixed[1].to(tl.float32)
        # Some sources are on their way while others are added up, here and below.
        coming = _load_rows(
            0, UNROLL, sources, rstds, newest, raws, M, T, at, stat, live, live_stat, dtype, H, K, BH, BA, BB
        )
        for first in tl.static_range(0, len(sources), UNROLL):
            rows = coming
            if first + UNROLL < len(sources):
                coming = _load_rows(
                    first + UNROLL, UNROLL, sources, rstds, newest, raws, M, T, at, stat, live, live_stat, dtype,
                    H, K, BH, BA, BB,
                )  # fmt: skip
            if first < M:
                for i in tl.static_range(first, first + UNROLL):
                    v, r, raw = rows[i - first]
                    p = tl.where(i < M, tl.exp(raw * r - z), 0.0)
                    m_a += p[:, :, None] * v[0].to(tl.float32)
                    if BB > 0:
                        m_b += p[:, :, None] * v[1].to(tl.float32)

        g_a, g_b = upstream[0].to(tl.float32), upstream[1].to(tl.float32)
        if NORM:
            # The norm had the mix as it was rounded.
            n_a, n_b = m_a.to(dtype).to(tl.float32), m_b.to(dtype).to(tl.float32)
            rho = tl.rsqrt(square((n_a, n_b), BB) / D + norm_eps)  # [BT]
            dgamma_a += g_a * n_a * rho[:, None, None]
            g_a *= gm[0].to(tl.float32)
            if BB > 0:
                dgamma_b += g_b * n_b * rho[:, None, None]
                g_b *= gm[1].to(tl.float32)
            along = tl.sum(dot((g_a, g_b), (n_a, n_b), BB), 1) * (rho * rho * rho / D)  # [BT]
            g_a = rho[:, None, None] * g_a - along[:, None, None] * n_a
            g_b = rho[:, None, None] * g_b - along[:, None, None] * n_b
        delta = dot((g_a, g_b), (m_a, m_b), BB)  # [BT, BH]

        lse_grad = p_in * (dot((g_a, g_b), mixed, BB) - delta)
        d_in = ((p_in[:, :, None] * g_a).to(dtype), (p_in[:, :, None] * g_b).to(dtype))
        store(partial_grad, at, d_in, mask_of(has, H, K, BH, BA, BB), BB)
        # From the gradient as it is rounded: the inter read has no other.
        tl.store(normaliser_grad + stat, lse_grad - dot(d_in, mixed, BB), mask=live_stat & (has_partial != 0))

        ahead = _load_some(
            0, UNROLL, sources, rstds, sums, rstd_sums, newest, raws, M, T, has_sums, has_rstd_sums,
            at, stat, live, live_stat, dtype, H, K, BH, BA, BB, SUMS,
        )  # fmt: skip
        for first in tl.static_range(0, len(sources), UNROLL):
            now = ahead
            if first + UNROLL < len(sources):
                ahead = _load_some(
                    first + UNROLL, UNROLL, sources, rstds, sums, rstd_sums, newest, raws, M, T,
                    has_sums, has_rstd_sums,
                    at, stat, live, live_stat, dtype, H, K, BH, BA, BB, SUMS,
                )  # fmt: skip
            if first < M:
                for i in tl.static_range(first, first + UNROLL):
                    v, total, r, raw, rstd_total = now[i - first]
                    v_a, v_b = v[0].to(tl.float32), v[1].to(tl.float32)
                    p = tl.where(i < M, tl.exp(raw * r - z), 0.0)
                    dl = p * (dot((v_a, v_b), (g_a, g_b), BB) - delta)
                    u = dl * r
                    dr = dl * raw
                    d_a = p[:, :, None] * g_a + u[:, :, None] * w[0]
                    d_b = p[:, :, None] * g_b + u[:, :, None] * w[1]
                    if SUMS:
                        dr += rstd_total
                        d_a += total[0].to(tl.float32)
                        d_b += total[1].to(tl.float32)
                    if i == 0:  # its rstd is born here, so the gradient through it is applied here, once
                        dr += tl.load(rstd_grad + stat, mask=live_stat & (has_rstd_grad != 0), other=0.0)
                        through = tl.sum(dr, 1)[:, None] * (r * r * r / D)  # [BT, BH]
                        d_a -= through[:, :, None] * v_a
                        d_b -= through[:, :, None] * v_b
                    else:
                        tl.store(_at(rstd_grads[i - 1], tl.float32) + stat, dr, mask=live_stat & (i < M))
                    used = mask_of(live & (i < M), H, K, BH, BA, BB)
                    store(_at(source_grads[i], dtype), at, (d_a.to(dtype), d_b.to(dtype)), used, BB)
                    dw_a += u[:, :, None] * v_a
                    if BB > 0:
                        dw_b += u[:, :, None] * v_b
    # One row of sums for the weight, and behind it one for the norm's.
    row = tl.full((1,), 1, tl.int64) * program * (2 if NORM else 1)
    _store_sum(weight_parts, column(row, H, K, BH, BA, BB), dw_a, dw_b, only_inside, BB)
    if NORM:
        _store_sum(weight_parts, column(row + 1, H, K, BH, BA, BB), dgamma_a, dgamma_b, only_inside, BB)


@triton.jit
def _load_rows(
    first: tl.constexpr, count: tl.constexpr, sources, rstds, newest, raws, M, T, at, stat, live, live_stat,
    dtype: tl.constexpr, H: tl.constexpr, K: tl.constexpr, BH: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr,
):  # fmt: skip
    """Rows of `count` sources, their rstd, their inner products with the weight."""
    loaded = ()  # type: tuple[tl.tensor, ...]
    for i in tl.static_range(first, first + count):
        v = load(_at(sources[i], dtype), at, mask_of(live & (i < M), H, K, BH, BA, BB), BB)
        if i == 0:
            r = tl.load(newest + stat, mask=live_stat, other=0.0)
        else:
            r = tl.load(_at(rstds[i - 1], tl.float32) + stat, mask=live_stat & (i < M), other=0.0)
        raw = tl.load(raws + i * tl.cast(T, tl.int64) * H + stat, mask=live_stat & (i < M), other=0.0)
        loaded = loaded + ((v, r, raw),)  # noqa: RUF005
    return loaded


@triton.jit
def _load_some(
    first: tl.constexpr, count: tl.constexpr,
    sources, rstds, sums, rstd_sums, newest, raws, M, T, has_sums, has_rstd_sums, at, stat, live, live_stat,
    dtype: tl.constexpr, H: tl.constexpr, K: tl.constexpr, BH: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """As `_load_rows`, with the sums so far of the gradients of the sources and of their rstd if there are SUMS."""
    rows = _load_rows(
        first, count, sources, rstds, newest, raws, M, T, at, stat, live, live_stat, dtype, H, K, BH, BA, BB
    )
    loaded = ()  # type: tuple[tl.tensor, ...]
    for i in tl.static_range(first, first + count):
        v, r, raw = rows[i - first]
        total, rstd_total = v, tl.zeros_like(r)
        if SUMS:
            summed = ((has_sums >> i) & 1) != 0
            total = load(_at(sums[i], dtype), at, mask_of(live & summed, H, K, BH, BA, BB), BB)
        if SUMS and i > 0:
            rstd_summed = ((has_rstd_sums >> (i - 1)) & 1) != 0
            rstd_total = tl.load(_at(rstd_sums[i - 1], tl.float32) + stat, mask=live_stat & rstd_summed, other=0.0)
        loaded = loaded + ((v, total, r, raw, rstd_total),)  # noqa: RUF005
    return loaded


@triton.jit
def _store_sum(pointer, at, a, b, inside, BB: tl.constexpr):
    """Sum over the tokens of a program."""
    store(pointer, at, (tl.sum(a, 0)[None, :, :], tl.sum(b, 0)[None, :, :]), inside, BB)


def forward(
    partial: Tensor | None,
    lse_in: Tensor | None,
    sources: Sequence[Tensor],
    rstd: Sequence[Tensor],
    weight: Tensor,
    norm_weight: Tensor | None,
    num_heads: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `two_phase.algebra.merge_forward`."""
    D = sources[0].shape[-1]
    out = sources[0].new_empty(sources[0].shape)
    lse = sources[0].new_empty((*out.shape[:-1], num_heads), dtype=torch.float32)
    newest, raws = torch.empty_like(lse), lse.new_empty((len(sources), *lse.shape))
    rows = [plain(source) for source in reversed(sources)]
    stats = [plain(r) for r in reversed(rstd)]
    partial, lse_in = (out, lse) if partial is None or lse_in is None else (plain(partial), plain(lse_in))
    row = plain(weight)
    gamma = row if norm_weight is None else plain(norm_weight)
    tile = merge_tile(num_heads, D // num_heads, out.element_size(), "forward")
    T = out.numel() // D
    with on_device(out):
        arguments = (
            _slots(rows), _slots(stats, len(rows), newest), partial, lse_in, row, gamma,
            out, lse, newest, raws, len(rows), T, int(partial is not out), eps, norm_eps,
        )  # fmt: skip
        constants = (*tile.block(num_heads, D), norm_weight is not None)
        launch(merge_forward_kernel, triton.cdiv(T, tile.tokens), arguments, constants, num_warps=tile.warps)
    return out, lse, newest, raws


def backward(
    grad: Tensor,
    rstd_grad: Tensor | None,
    partial: Tensor | None,
    lse_in: Tensor | None,
    lse: Tensor,
    newest: Tensor,
    raws: Tensor,
    sources: Sequence[Tensor],
    rstd: Sequence[Tensor],
    weight: Tensor,
    norm_weight: Tensor | None,
    num_heads: int,
    norm_eps: float,
    addends: Sequence[Tensor | None] = (),
    rstd_addends: Sequence[Tensor | None] = (),
) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor, Tensor]:
    """As `two_phase.algebra.merge_backward`."""
    like, D, m = sources[0], grad.shape[-1], len(sources)
    grad = plain(grad)
    source_grads = [like.new_empty(like.shape) for _ in sources]
    rstd_grads = [torch.empty_like(lse) for _ in rstd]
    inter_grads = [] if partial is None else [like.new_empty(like.shape), torch.empty_like(lse)]
    rows = [plain(source) for source in reversed(sources)]
    stats = [plain(r) for r in reversed(rstd)]
    sums, has_sums = _optionals(addends or [None] * m, rows)
    rstd_sums, has_rstd_sums = _optionals(rstd_addends or [None] * (m - 1), stats)
    partial, lse_in = (grad, lse) if partial is None or lse_in is None else (plain(partial), plain(lse_in))
    partial_grad, normaliser_grad = inter_grads or (grad, lse)
    tile = merge_tile(num_heads, D // num_heads, grad.element_size(), "backward")
    T, weight = grad.numel() // D, plain(weight)
    blocks = triton.cdiv(T, tile.tokens)
    steps = triton.cdiv(blocks, parts("merge_backward"))
    programs = triton.cdiv(blocks, steps)
    weight_parts = weight.new_empty((programs, 1 if norm_weight is None else 2, D))
    with on_device(grad):
        arguments = (
            _slots(rows), _slots(stats, len(rows), newest), _slots(sums), _slots(rstd_sums, len(rows), newest),
            _slots(source_grads[::-1]), _slots(rstd_grads[::-1], len(rows), newest),
            grad, newest if rstd_grad is None else plain(rstd_grad), partial, lse_in, plain(lse), plain(newest),
            plain(raws), weight, weight if norm_weight is None else plain(norm_weight),
            partial_grad, normaliser_grad, weight_parts, m, T, steps,
            len(inter_grads), int(rstd_grad is not None), has_sums, has_rstd_sums, norm_eps,
        )  # fmt: skip
        unroll = min(tile.unroll, len(arguments[0]))
        constants = (*tile.block(num_heads, D), norm_weight is not None, bool(has_sums or has_rstd_sums), unroll)
        launch(merge_backward_kernel, programs, arguments, constants, num_warps=tile.warps)
        weight_grad, norm_grad = sum_parts(weight_parts, None if norm_weight is None else norm_weight.dtype)
        norm_grad = grad.new_empty(0) if norm_weight is None else norm_grad
        return inter_grads, source_grads, rstd_grads, weight_grad.view(D), norm_grad


def _slots(tensors: Sequence[Tensor], count: int = 0, empty: Tensor | None = None) -> tuple[int, ...]:
    """Addresses, padded with ones that are not followed."""
    addresses = [tensor.data_ptr() for tensor in tensors]
    size = next((slots for slots in SLOTS if slots >= max(count, len(addresses))), None)
    if size is None:
        raise ValueError(f"a merge takes at most {SLOTS[-1]} sources, got {len(addresses)}")
    padding = addresses[-1] if addresses else empty.data_ptr()  # type: ignore[union-attr]
    return (*addresses, *[padding] * (size - len(addresses)))


def _optionals(tensors: Sequence[Tensor | None], others: Sequence[Tensor]) -> tuple[list[Tensor], int]:
    """Tensors, newest first, in the place of absent ones those of `others`, and the set of present ones as bits."""
    tensors = tensors[::-1]
    present = sum(1 << i for i, tensor in enumerate(tensors) if tensor is not None)
    filled = [other if tensor is None else plain(tensor) for tensor, other in zip(tensors, others, strict=True)]
    return filled, present
