"""The gated form of a merge, for schemes that read beside a stream: stream + gate * mix.

Inside a block the shared sources do not change, so one `inter` read serves all its sites. Each site merges its part
with one vector of its own that is the same for every token, and adds the gated mix to the stream.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from depthroute.ops.reference import accumulation_dtype
from depthroute.ops.two_phase.register import _bodies, _row_like, _stat_like


def gated_merge(
    stream: Tensor,
    gate: Tensor,
    partial: Tensor,
    lse_in: Tensor,
    null: Tensor,
    weight: Tensor,
    num_heads: int,
    eps: float,
    *,
    kernels: bool,
) -> Tensor:
    """stream + gate * mix (..., D), where mix merges one site's part of an `inter` read with a null source.

    stream: (..., D), of a dtype of its own. gate: (1,). partial, lse_in: what `inter` gave for this site.
    null: (D,), the null source, which takes the place of a row in every token. weight: (D,), that of the site.
    The gradients of gate, null and weight are sums over tokens.
    """
    dtype = accumulation_dtype(partial.dtype)
    gate = gate.to(stream.dtype)
    null = null.to(partial.dtype)  # a source like the others: rounded as they are
    row = null.to(dtype)
    rstd = torch.rsqrt(row.square().mean() + eps)
    logit = rstd * (row * weight.to(dtype)).unflatten(-1, (num_heads, -1)).sum(-1)
    if torch.compiler.is_compiling():
        return gated_op(stream, gate, partial, lse_in, null, logit, num_heads, kernels)
    if not torch.is_grad_enabled():
        return _bodies(kernels).gated_forward(stream, gate, partial, lse_in, null, logit, num_heads)
    return _Gated.apply(stream, gate, partial, lse_in, null, logit, num_heads, kernels)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stream: Tensor, *inputs: Any) -> Tensor:
        *tensors, ctx.num_heads, ctx.kernels = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        return _bodies(ctx.kernels).gated_forward(stream, *tensors, ctx.num_heads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * 8
        grads = _bodies(ctx.kernels).gated_backward(grad, *ctx.saved_tensors, ctx.num_heads)
        return grad, *grads, None, None


@torch.library.custom_op("depthroute::gated_merge", mutates_args=())
def gated_op(
    stream: Tensor,
    gate: Tensor,
    partial: Tensor,
    lse_in: Tensor,
    null: Tensor,
    null_logit: Tensor,
    num_heads: int,
    kernels: bool,
) -> Tensor:
    return _bodies(kernels).gated_forward(stream, gate, partial, lse_in, null, null_logit, num_heads)


@gated_op.register_fake
def _(
    stream: Tensor,
    gate: Tensor,
    partial: Tensor,
    lse_in: Tensor,
    null: Tensor,
    null_logit: Tensor,
    num_heads: int,
    kernels: bool,
) -> Tensor:
    return _row_like(stream)


@torch.library.custom_op("depthroute::gated_merge_backward", mutates_args=())
def gated_backward_op(
    grad: Tensor,
    gate: Tensor,
    partial: Tensor,
    lse_in: Tensor,
    null: Tensor,
    null_logit: Tensor,
    num_heads: int,
    kernels: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _bodies(kernels).gated_backward(grad, gate, partial, lse_in, null, null_logit, num_heads)


@gated_backward_op.register_fake
def _(
    grad: Tensor,
    gate: Tensor,
    partial: Tensor,
    lse_in: Tensor,
    null: Tensor,
    null_logit: Tensor,
    num_heads: int,
    kernels: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    vectors = gate.new_empty(gate.shape), null.new_empty(null.shape), null_logit.new_empty(null_logit.shape)
    return vectors[0], _row_like(partial), _stat_like(partial, num_heads), vectors[1], vectors[2]


def _gated_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *tensors, ctx.num_heads, ctx.kernels = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)


def _gated_backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 8
    return grad, *gated_backward_op(grad, *ctx.saved_tensors, ctx.num_heads, ctx.kernels), None, None


gated_op.register_autograd(_gated_backward, setup_context=_gated_setup)
