"""One site of a tile in Triton: a partial mix and the few sources born in the tile, and the RMSNorm that may follow.

A program holds whole rows, all heads. Rows of D values, for M sources and each token:
forward 1 (partial) + M, and 1 written; backward 2 (gradient, partial) + M + the sums so far of M - 1 sources, and M + 1
written. Both hold the rows of all sources in registers, so all are on their way at once; the backward uses them twice,
to make the mix again and then for their gradients, and finds their inner products with the weight where the forward
left them. All loads of a token come before its first store, since none is moved up past one (of the sums so far, each
before the store of the source ahead of it); what the next token needs is on its way to the L2 cache meanwhile. Bound by
memory; between the sites of a tile most sources stay in that cache.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from depthroute.ops.kernels.launch import cdiv, contiguous_like, launch, on_device, plain
from depthroute.ops.kernels.prefetch import fetch, lines_of
from depthroute.ops.kernels.rows import (
    COMPILED,
    add,
    add_scaled,
    as_loaded,
    column,
    dot,
    load,
    mask_of,
    multiply,
    opaque,
    round_to,
    scale,
    square,
    store,
    store_factor,
    subtract,
    sum_tokens,
    zeros,
)
from depthroute.ops.kernels.settings import merge_budget, merge_tile
from depthroute.ops.kernels.sums import sum_parts

# Addresses travel as arguments: a table in memory would cost a launch for every site. The lists are padded, and the
# number of sources below their end is a run-time value, so only a few variants are ever compiled.
SLOTS = (2, 4, 6, 8, 16)


@triton.jit
def _at(address, dtype: tl.constexpr):
    """An address argument as a pointer that is known to be aligned for vector loads."""
    return tl.multiple_of(tl.cast(address, tl.int64).to(tl.pointer_type(dtype)), 16)


@triton.jit
def _rows(sources, M, at, live, dtype: tl.constexpr, H: tl.constexpr, K: tl.constexpr, BH: tl.constexpr,
          W: tl.constexpr, P: tl.constexpr):  # fmt: skip
    """Rows of all sources, on their way at once. Slots from M on are masked and cause no traffic."""
    values = ()  # type: tuple[tl.tensor, ...]
    for i in tl.static_range(len(sources)):
        values = values + (load(_at(sources[i], dtype), at, mask_of(live & (i < M), H, K, BH, W), P),)  # noqa: RUF005
    return values


@triton.jit
def _sum(sums, i: tl.constexpr, has_sums, at, live, dtype: tl.constexpr, H: tl.constexpr, K: tl.constexpr,
         BH: tl.constexpr, W: tl.constexpr, P: tl.constexpr):  # fmt: skip
    """The sum so far of source i, zero where there is none."""
    return load(_at(sums[i], dtype), at, mask_of(live & (((has_sums >> i) & 1) != 0), H, K, BH, W), P)


@triton.jit(do_not_specialize=["M", "T", "has_partial"])
def merge_forward_kernel(
    sources, rstds, partial, lse_in, weight, gamma, out, lse, newest, raws, M, T, has_partial, eps, norm_eps,
    H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, W: tl.constexpr, P: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = out.dtype.element_ty
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    head = tl.arange(0, BH)
    live = token < T
    stat = token[:, None] * H + head[None, :]
    live_stat = live[:, None] & (head < H)[None, :]
    at = column(token, H, K, BH, W)
    only_at, always = column(tl.zeros((1,), tl.int64), H, K, BH, W), mask_of(tl.full((1,), 1, tl.int1), H, K, BH, W)
    w = load(weight, only_at, always, P)
    if NORM:
        gm = load(gamma, only_at, always, P)

    values = _rows(sources, M, at, live, dtype, H, K, BH, W, P)  # the newest comes first
    mixed = load(partial, at, mask_of(live & (has_partial != 0), H, K, BH, W), P)
    z = tl.load(lse_in + stat, mask=live_stat & (has_partial != 0), other=float("-inf"))
    stats = ()  # type: tuple[tl.tensor, ...]
    for i in tl.static_range(1, len(sources)):
        r = tl.load(_at(rstds[i - 1], tl.float32) + stat, mask=live_stat & (i < M), other=0.0)
        stats = stats + (r,)  # noqa: RUF005

    rstd = tl.rsqrt(square(values[0]) / (H * K) + eps)  # [BT]
    store_factor(newest + stat, tl.broadcast_to(rstd[:, None], (BT, BH)), live_stat)
    raw = dot(values[0], w)  # [BT, BH]
    store_factor(raws + stat, raw, live_stat)
    logit = raw * rstd[:, None]
    top = tl.maximum(z, logit)
    logits = (logit,)  # type: tuple[tl.tensor, ...]
    for i in tl.static_range(1, len(sources)):
        raw = dot(values[i], w)
        store_factor(raws + i * tl.cast(T, tl.int64) * H + stat, raw, live_stat & (i < M))
        logit = tl.where(i < M, raw * stats[i - 1], float("-inf"))
        top = tl.maximum(top, logit)
        logits = logits + (logit,)  # noqa: RUF005
    p = tl.exp(z - top)
    whole = p
    mix = scale(p, mixed)
    for i in tl.static_range(len(sources)):
        p = tl.exp(logits[i] - top)
        whole += p
        mix = add_scaled(mix, p, values[i])
    mix = round_to(scale(1 / whole, mix), dtype)
    store_factor(lse + stat, top + tl.log(whole), live_stat)
    if NORM:
        rho = tl.rsqrt(square(mix) / (H * K) + norm_eps)[:, None] + tl.zeros_like(whole)
        # Rounded as the norm module rounds: to the type of the mix before the weight comes in.
        mix = multiply(round_to(scale(rho, mix), dtype), gm)
    store(out, at, mix, mask_of(live, H, K, BH, W))


@triton.jit(do_not_specialize=["M", "T", "steps", "has_partial", "has_rstd_grad", "has_sums", "has_rstd_sums"])
def merge_backward_kernel(
    sources, rstds, sums, rstd_sums, source_grads, rstd_grads,
    grad, rstd_grad, partial, lse_in, lse, newest, raws, weight, gamma,
    partial_grad, normaliser_grad, weight_parts, norm_parts,
    M, T, steps, has_partial, has_rstd_grad, has_sums, has_rstd_sums, norm_eps,
    H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, W: tl.constexpr, P: tl.constexpr,
    NORM: tl.constexpr, SUMS: tl.constexpr, RSTD_SUMS: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = grad.dtype.element_ty
    D: tl.constexpr = H * K
    program = tl.program_id(0).to(tl.int64)
    run = program * steps * BT
    steps = tl.minimum(steps, tl.maximum(tl.cdiv(T - run, BT), 0)).to(tl.int32)  # past the end a program leaves zeros
    head = tl.arange(0, BH)
    # A copy for each token: a single one would be brought into the layout of the rows at each use.
    copy_at, copies = column(tl.zeros((BT,), tl.int64), H, K, BH, W), mask_of(tl.full((BT,), 1, tl.int1), H, K, BH, W)
    w = load(weight, copy_at, copies, P)
    dw = zeros(BT, BH, W, P)
    if NORM:
        gm = load(gamma, copy_at, copies, P)
        dgamma = zeros(BT, BH, W, P)
    if COMPILED:  # numbers of all tokens of the program, or many; of what is absent the address is one that is there
        lines = lines_of(tl.minimum(T - run, steps * BT) * H, steps > 0, 4, 1024)
        fetch(lse, run * H, lines)
        fetch(newest, run * H, lines)
        fetch(lse_in, run * H, lines)
        fetch(rstd_grad, run * H, lines)
        for i in tl.static_range(len(sources)):
            fetch(raws, (tl.minimum(i, M - 1) * tl.cast(T, tl.int64) + run) * H, lines)
            if i > 0:
                fetch(_at(rstds[i - 1], tl.float32), run * H, lines)
    for step in range(steps):
        first = run + opaque(step) * BT
        token = first + tl.arange(0, BT)
        live = token < T
        stat = token[:, None] * H + head[None, :]
        live_stat = live[:, None] & (head < H)[None, :]
        at = column(token, H, K, BH, W)

        upstream = load(grad, at, mask_of(live, H, K, BH, W), P)
        has, has_stat = mask_of(live & (has_partial != 0), H, K, BH, W), live_stat & (has_partial != 0)
        mixed = load(partial, at, has, P)
        values = _rows(sources, M, at, live, dtype, H, K, BH, W, P)
        z = tl.load(lse + stat, mask=live_stat, other=0.0)
        p_in = tl.exp(tl.load(lse_in + stat, mask=has_stat, other=float("-inf")) - z)
        stats = ()  # type: tuple[tl.tensor, ...]
        for i in tl.static_range(len(sources)):
            if i == 0:
                r = tl.load(newest + stat, mask=live_stat, other=0.0)
            else:
                r = tl.load(_at(rstds[i - 1], tl.float32) + stat, mask=live_stat & (i < M), other=0.0)
            raw = tl.load(raws + i * tl.cast(T, tl.int64) * H + stat, mask=live_stat & (i < M), other=0.0)
            if i == 0:
                dr = tl.load(rstd_grad + stat, mask=live_stat & (has_rstd_grad != 0), other=0.0)
            elif RSTD_SUMS:
                summed = live_stat & (((has_rstd_sums >> (i - 1)) & 1) != 0)
                dr = tl.load(_at(rstd_sums[i - 1], tl.float32) + stat, mask=summed, other=0.0)
            else:
                dr = tl.zeros_like(r)
            stats = stats + ((r, raw, dr),)  # noqa: RUF005
        if SUMS:
            d_next = _sum(sums, 0, has_sums, at, live, dtype, H, K, BH, W, P)

        if COMPILED:  # rows of the next tokens
            asked = (step + 1 < steps) & (first + 2 * BT <= T)
            of_row = lines_of(BT * D, asked, dtype.primitive_bitwidth // 8, BT * D)
            soon = (first + BT) * D
            fetch(grad, soon, of_row)
            fetch(partial, soon, of_row)
            for i in tl.static_range(len(sources)):
                if i < M:
                    fetch(_at(sources[i], dtype), soon, of_row)

        m = scale(p_in, mixed)
        for i in tl.static_range(len(sources)):
            if i < M:
                r, raw, dr = stats[i]
                m = add_scaled(m, tl.exp(raw * r - z), values[i])
        g = upstream
        if NORM:
            # The norm had the mix as it was rounded.
            n = round_to(m, dtype)
            rho = tl.rsqrt(square(n) / D + norm_eps)[:, None] + tl.zeros_like(z)  # [BT, BH]
            dgamma = add_scaled(dgamma, rho, multiply(upstream, n))
            g = multiply(upstream, gm)
            along = tl.sum(dot(g, n), 1)[:, None] * (rho * rho * rho / D)
            g = add_scaled(scale(rho, g), -along, n)
        delta = dot(g, m)  # [BT, BH]

        whole = scale(p_in, g)
        store(partial_grad, at, whole, has)
        # <whole, partial> less that of what is stored: the inter read has no other.
        lost = subtract(whole, round_to(whole, dtype))
        store_factor(normaliser_grad + stat, dot(lost, as_loaded(mixed)) - p_in * delta, has_stat)

        for i in tl.static_range(len(sources)):
            if SUMS:  # the next one is loaded before this one's gradient is stored
                d_sum = d_next
                if i + 1 < len(sources):
                    d_next = _sum(sums, i + 1, has_sums, at, live, dtype, H, K, BH, W, P)
            if i < M:
                r, raw, dr = stats[i]
                v = as_loaded(values[i])
                p = tl.exp(raw * r - z)
                dl = p * (dot(v, g) - delta)
                u = dl * r
                dr += dl * raw
                d = add_scaled(scale(p, g), u, w)
                if SUMS:
                    d = add(d, d_sum)
                if i == 0:  # its rstd is born here, so the gradient through it is applied here, once
                    d = add_scaled(d, -tl.sum(dr, 1)[:, None] * (r * r * r / D), v)
                else:
                    store_factor(_at(rstd_grads[i - 1], tl.float32) + stat, dr, live_stat)
                store(_at(source_grads[i], dtype), at, d, mask_of(live, H, K, BH, W))
                dw = add_scaled(dw, u, v)
    part_at = column(tl.full((1,), 1, tl.int64) * program, H, K, BH, W)
    always = mask_of(tl.full((1,), 1, tl.int1), H, K, BH, W)
    store(weight_parts, part_at, sum_tokens(dw), always)
    if NORM:
        store(norm_parts, part_at, sum_tokens(dgamma), always)


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
    out = contiguous_like(sources[0])
    lse = sources[0].new_empty((*out.shape[:-1], num_heads), dtype=torch.float32)
    newest, raws = contiguous_like(lse), lse.new_empty((len(sources), *lse.shape))
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
        launch(merge_forward_kernel, cdiv(T, tile.tokens), arguments, constants, num_warps=tile.warps)
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
    parts: int | None = None,
) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor, Tensor]:
    """As `two_phase.algebra.merge_backward`."""
    like, D, m = sources[0], grad.shape[-1], len(sources)
    grad = plain(grad)
    source_grads = [contiguous_like(like) for _ in sources]
    rstd_grads = [contiguous_like(lse) for _ in rstd]
    inter_grads = [] if partial is None else [contiguous_like(like), contiguous_like(lse)]
    rows = [plain(source) for source in reversed(sources)]
    stats = [plain(r) for r in reversed(rstd)]
    sums, has_sums = _optionals(addends or [None] * m, rows)
    rstd_sums, has_rstd_sums = _optionals(rstd_addends or [None] * (m - 1), stats)
    partial, lse_in = (grad, lse) if partial is None or lse_in is None else (plain(partial), plain(lse_in))
    partial_grad, normaliser_grad = inter_grads or (grad, lse)
    tile = merge_tile(num_heads, D // num_heads, grad.element_size(), "backward")
    T, weight = grad.numel() // D, plain(weight)
    blocks = cdiv(T, tile.tokens)
    registers, programs = merge_budget(tile, grad.element_size(), m)
    steps = cdiv(blocks, min(programs, parts or programs))
    programs = parts or cdiv(blocks, steps)
    weight_parts = weight.new_empty((programs, D))
    norm_parts = weight_parts if norm_weight is None else torch.empty_like(weight_parts)
    with on_device(grad):
        arguments = (
            _slots(rows), _slots(stats, len(rows), newest), _slots(sums), _slots(rstd_sums, len(rows), newest),
            _slots(source_grads[::-1]), _slots(rstd_grads[::-1], len(rows), newest),
            grad, newest if rstd_grad is None else plain(rstd_grad), partial, lse_in, plain(lse), plain(newest),
            plain(raws), weight, weight if norm_weight is None else plain(norm_weight),
            partial_grad, normaliser_grad, weight_parts, norm_parts, m, T, steps,
            len(inter_grads), int(rstd_grad is not None), has_sums, has_rstd_sums, norm_eps,
        )  # fmt: skip
        constants = (*tile.block(num_heads, D), norm_weight is not None, bool(has_sums), bool(has_rstd_sums))
        options = {"num_warps": tile.warps, "maxnreg": registers}
        launch(merge_backward_kernel, programs, arguments, constants, **options)
        weight_grad = sum_parts(weight_parts) if parts is None else weight_parts
        norm_grad = grad.new_empty(0) if norm_weight is None else sum_parts(norm_parts, norm_weight.dtype)
        return inter_grads, source_grads, rstd_grads, weight_grad, norm_grad


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
