"""stream + gate * (a partial mix merged with a vector that all tokens share), in Triton.

Rows of D values for each token: forward the stream and the partial mix, and one written; backward the gradient and the
partial mix, and one written. What is next is on its way to the L2 cache meanwhile.
"""

import triton
import triton.language as tl
from torch import Tensor

from depthroute.ops.kernels.launch import cdiv, contiguous_like, launch, on_device, plain
from depthroute.ops.kernels.prefetch import fetch, lines_of
from depthroute.ops.kernels.rows import (
    COMPILED,
    add,
    add_scaled,
    column,
    dot,
    load,
    mask_of,
    opaque,
    round_to,
    scale,
    store,
    store_factor,
    sum_tokens,
    zeros,
)
from depthroute.ops.kernels.settings import gated_budget, merge_tile
from depthroute.ops.kernels.sums import sum_columns


@triton.jit
def _weights(lse_in, stat, mask, null_logit, head, H: tl.constexpr):
    """Weights of the partial mix and of the null vector, [tokens, heads]."""
    z = tl.load(lse_in + stat, mask=mask, other=0.0)
    null = tl.load(null_logit + head, mask=head < H, other=0.0)[None, :]
    top = tl.maximum(z, null)
    p, q = tl.exp(z - top), tl.exp(null - top)
    return p / (p + q), q / (p + q)


@triton.jit(do_not_specialize=["T"])
def gated_forward_kernel(
    stream, partial, lse_in, null, logits_and_gate, out, T,
    H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, W: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    head = tl.arange(0, BH)
    live = token < T
    at = column(token, H, K, BH, W)
    inside = mask_of(live, H, K, BH, W)
    v = load(partial, at, inside, P)
    x = load(stream, at, inside, P)
    once = tl.full((1,), 1, tl.int1)
    s = load(null, column(tl.zeros((1,), tl.int64), H, K, BH, W), mask_of(once, H, K, BH, W), P)
    stat, live_stat = token[:, None] * H + head[None, :], live[:, None] & (head < H)[None, :]
    p, q = _weights(lse_in, stat, live_stat, logits_and_gate, head, H)
    wide: tl.constexpr = out.dtype.element_ty
    mix = round_to(add_scaled(scale(p, v), q, s), partial.dtype.element_ty)  # as a source is
    g = tl.zeros_like(p) + tl.load(logits_and_gate + H)
    store(out, at, add(round_to(scale(g, round_to(mix, wide)), wide), x), inside)


@triton.jit(do_not_specialize=["T", "steps"])
def gated_backward_kernel(
    grad, partial, lse_in, null, logits_and_gate, partial_grad, lse_grad, parts, T, steps,
    H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, W: tl.constexpr, P: tl.constexpr,
    OWN: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = H * K
    program = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BH)
    once = tl.full((1,), 1, tl.int1)
    only_at, only_inside = column(tl.zeros((1,), tl.int64), H, K, BH, W), mask_of(once, H, K, BH, W)
    s = load(null, only_at, only_inside, P)
    through = tl.load(logits_and_gate + H)
    dgate = tl.zeros((BT, BH), tl.float32)
    dlogit = tl.zeros((BT, BH), tl.float32)
    dnull = zeros(BT, BH, W, P)
    for step in range(steps):
        first = (program * steps + opaque(step)) * BT
        token = first + tl.arange(0, BT)
        live = token < T
        stat = token[:, None] * H + head[None, :]
        live_stat = live[:, None] & (head < H)[None, :]
        at = column(token, H, K, BH, W)
        inside = mask_of(live, H, K, BH, W)
        g = load(grad, at, inside, P)
        v = load(partial, at, inside, P)
        p, q = _weights(lse_in, stat, live_stat, logits_and_gate, head, H)
        if COMPILED:  # rows of the next tokens
            asked, soon = (step + 1 < steps) & (first + 2 * BT <= T), first + BT
            fetch(grad, soon * D, lines_of(BT * D, asked, grad.dtype.element_ty.primitive_bitwidth // 8, BT * D))
            fetch(partial, soon * D, lines_of(BT * D, asked, partial.dtype.element_ty.primitive_bitwidth // 8, BT * D))
            fetch(lse_in, soon * H, lines_of(BT * H, asked, 4, BT * H))
        along = dot(g, v)  # [BT, BH]
        along_null = dot(g, s)
        along_mix = p * along + q * along_null
        dgate += along_mix
        dlogit += q * through * (along_null - along_mix)
        store(partial_grad, at, scale(p * through, g), inside)
        store_factor(lse_grad + stat, p * through * (along - along_mix), live_stat)
        dnull = add_scaled(dnull, q * through, g)
    # One row of sums: of the logits, the gate, the padding, the null vector.
    own = parts + program * (OWN + D)
    behind = tl.arange(0, triton.next_power_of_2(OWN))
    tl.store(own + head, tl.sum(dlogit, 0), mask=head < H)
    total = tl.where(behind == H, tl.sum(tl.sum(dgate, 1), 0), 0.0)
    tl.store(own + behind, total, mask=(behind >= H) & (behind < OWN))
    store(own + OWN, only_at, sum_tokens(dnull), only_inside)


def forward(
    stream: Tensor, partial: Tensor, lse_in: Tensor, null: Tensor, logits_and_gate: Tensor, num_heads: int
) -> Tensor:
    """As `two_phase.algebra.gated_forward`."""
    D = stream.shape[-1]
    out = contiguous_like(stream)
    T = out.numel() // D
    tile = merge_tile(num_heads, D // num_heads, out.element_size(), "forward")
    with on_device(out):
        tensors = [plain(tensor) for tensor in (stream, partial, lse_in, null, logits_and_gate)]
        programs = cdiv(T, tile.tokens)
        launch(gated_forward_kernel, programs, (*tensors, out, T), tile.block(num_heads, D), num_warps=tile.warps)
    return out


def backward(
    grad: Tensor, partial: Tensor, lse_in: Tensor, null: Tensor, logits_and_gate: Tensor, num_heads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `two_phase.algebra.gated_backward`."""
    D = partial.shape[-1]
    T = partial.numel() // D
    partial_grad, lse_grad = contiguous_like(partial), contiguous_like(lse_in)
    tile = merge_tile(num_heads, D // num_heads, partial.element_size(), "backward")
    blocks = cdiv(T, tile.tokens)
    registers, programs = gated_budget(tile)
    steps = cdiv(blocks, programs)
    programs = cdiv(blocks, steps)
    own = logits_and_gate.numel()
    parts = lse_in.new_empty((programs, own + D))
    with on_device(partial):
        tensors = [plain(tensor) for tensor in (grad, partial, lse_in, null, logits_and_gate)]
        arguments = (*tensors, partial_grad, lse_grad, parts, T, steps)
        options = {"num_warps": tile.warps, "maxnreg": registers}
        launch(gated_backward_kernel, programs, arguments, (*tile.block(num_heads, D), own), **options)
        own_grad, null_grad = sum_columns(parts, own, null.dtype)
        return partial_grad, lse_grad, null_grad, own_grad
