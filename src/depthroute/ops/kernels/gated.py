"""stream + gate * (a partial mix merged with a vector that all tokens share), in Triton.

Rows of D values for each token: forward the stream and the partial mix, and one written; backward the gradient and the
partial mix, and one written.
"""

import triton
import triton.language as tl
from torch import Tensor

from depthroute.ops.kernels.launch import cdiv, contiguous_like, launch, on_device, plain
from depthroute.ops.kernels.rows import (
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
from depthroute.ops.kernels.settings import merge_budget, merge_tile


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
    stream, gate, partial, lse_in, null, null_logit, out, T,
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
    p, q = _weights(
        lse_in, token[:, None] * H + head[None, :], live[:, None] & (head < H)[None, :], null_logit, head, H
    )
    wide: tl.constexpr = out.dtype.element_ty
    mix = round_to(add_scaled(scale(p, v), q, s), partial.dtype.element_ty)  # as a source is
    g = tl.zeros_like(p) + tl.load(gate).to(tl.float32)
    store(out, at, add(round_to(scale(g, round_to(mix, wide)), wide), x), inside)


@triton.jit(do_not_specialize=["T", "steps"])
def gated_backward_kernel(
    grad, gate, partial, lse_in, null, null_logit,
    partial_grad, lse_grad, gate_parts, null_parts, logit_parts, T, steps,
    H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, W: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BH)
    once = tl.full((1,), 1, tl.int1)
    only_inside = mask_of(once, H, K, BH, W)
    s = load(null, column(tl.zeros((1,), tl.int64), H, K, BH, W), only_inside, P)
    through = tl.load(gate).to(tl.float32)
    dgate = tl.zeros((BT, BH), tl.float32)
    dlogit = tl.zeros((BT, BH), tl.float32)
    dnull = zeros(BT, BH, W, P)
    for step in range(steps):
        token = (program * steps + opaque(step)) * BT + tl.arange(0, BT)
        live = token < T
        stat = token[:, None] * H + head[None, :]
        live_stat = live[:, None] & (head < H)[None, :]
        at = column(token, H, K, BH, W)
        inside = mask_of(live, H, K, BH, W)
        g = load(grad, at, inside, P)
        v = load(partial, at, inside, P)
        p, q = _weights(lse_in, stat, live_stat, null_logit, head, H)
        along = dot(g, v)  # [BT, BH]
        along_null = dot(g, s)
        along_mix = p * along + q * along_null
        dgate += along_mix
        dlogit += q * through * (along_null - along_mix)
        store(partial_grad, at, scale(p * through, g), inside)
        store_factor(lse_grad + stat, p * through * (along - along_mix), live_stat)
        dnull = add_scaled(dnull, q * through, g)
    tl.store(gate_parts + program, tl.sum(tl.sum(dgate, 1), 0))
    tl.store(logit_parts + program * H + head, tl.sum(dlogit, 0), mask=head < H)
    own = column(tl.full((1,), 1, tl.int64) * program, H, K, BH, W)
    store(null_parts, own, sum_tokens(dnull), only_inside)


def forward(
    stream: Tensor, gate: Tensor, partial: Tensor, lse_in: Tensor, null: Tensor, null_logit: Tensor, num_heads: int
) -> Tensor:
    """As `two_phase.algebra.gated_forward`."""
    D = stream.shape[-1]
    out = contiguous_like(stream)
    T = out.numel() // D
    tile = merge_tile(num_heads, D // num_heads, out.element_size(), "forward")
    with on_device(out):
        tensors = [plain(tensor) for tensor in (stream, gate, partial, lse_in, null, null_logit)]
        programs = cdiv(T, tile.tokens)
        launch(gated_forward_kernel, programs, (*tensors, out, T), tile.block(num_heads, D), num_warps=tile.warps)
    return out


def backward(
    grad: Tensor, gate: Tensor, partial: Tensor, lse_in: Tensor, null: Tensor, null_logit: Tensor, num_heads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `two_phase.algebra.gated_backward`."""
    D = partial.shape[-1]
    T = partial.numel() // D
    partial_grad, lse_grad = contiguous_like(partial), contiguous_like(lse_in)
    tile = merge_tile(num_heads, D // num_heads, partial.element_size(), "backward")
    blocks = cdiv(T, tile.tokens)
    registers, programs = merge_budget(tile, partial.element_size(), 1)
    steps = cdiv(blocks, programs)
    programs = cdiv(blocks, steps)
    gate_parts = lse_in.new_empty(programs)
    null_parts, logit_parts = lse_in.new_empty((programs, D)), lse_in.new_empty((programs, num_heads))
    with on_device(partial):
        tensors = [plain(tensor) for tensor in (grad, gate, partial, lse_in, null, null_logit)]
        arguments = (*tensors, partial_grad, lse_grad, gate_parts, null_parts, logit_parts, T, steps)
        options = {"num_warps": tile.warps, "maxnreg": registers}
        launch(gated_backward_kernel, programs, arguments, tile.block(num_heads, D), **options)
        gate_grad = gate_parts.sum(0, keepdim=True).to(gate.dtype)
        return gate_grad, partial_grad, lse_grad, null_parts.sum(0).to(null.dtype), logit_parts.sum(0)
