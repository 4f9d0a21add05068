"""The Triton read as PyTorch operators, `depthroute::depth_mix` and `depthroute::depth_mix_backward`.

torch.compile sees the operators and never looks inside. Eagerly a plain autograd function launches the same kernels,
at a lower cost for the host. Both share one backward, which cannot be differentiated again and says so.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def _forward(sources: Sequence[Tensor], weight: Tensor, num_heads: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    from depthroute.ops.kernels import read  # the first read imports Triton, nothing before it does

    return read.forward(sources, weight, num_heads, eps)


def _backward(
    grad: Tensor,
    sources: Sequence[Tensor],
    weight: Tensor,
    lse: Tensor,
    rstd: Tensor,
    num_heads: int,
    wanted: Sequence[bool],
) -> tuple[list[Tensor], Tensor]:
    from depthroute.ops.kernels import read

    return read.backward(grad, sources, weight, lse, rstd, num_heads, wanted)


depth_mix = torch.library.custom_op("depthroute::depth_mix", _forward, mutates_args=())
depth_mix_backward = torch.library.custom_op("depthroute::depth_mix_backward", _backward, mutates_args=())


@depth_mix.register_fake
def _(sources: Sequence[Tensor], weight: Tensor, num_heads: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    mix = sources[0].new_empty(sources[0].shape)
    lse = weight.new_empty((*mix.shape[:-1], num_heads))
    rstd = weight.new_empty((*mix.shape[:-1], len(sources)))
    return mix, lse, rstd


@depth_mix_backward.register_fake
def _(
    grad: Tensor,
    sources: Sequence[Tensor],
    weight: Tensor,
    lse: Tensor,
    rstd: Tensor,
    num_heads: int,
    wanted: Sequence[bool],
) -> tuple[list[Tensor], Tensor]:
    return [grad.new_empty(grad.shape) for each in wanted if each], weight.new_empty(weight.shape)


def _save(ctx: Any, sources: Sequence[Tensor], weight: Tensor, num_heads: int, output: tuple[Tensor, ...]) -> None:
    _, lse, rstd = output
    ctx.num_heads = num_heads
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(lse, rstd)
    ctx.save_for_backward(lse, rstd, weight, *sources)


def _gradients(
    ctx: Any, grad: Tensor | None, wanted: Sequence[bool], backward: Callable[..., tuple[list[Tensor], Tensor]]
) -> tuple[list[Tensor | None], Tensor | None]:
    """One entry for each source, None where it is not wanted; then the gradient of the weight."""
    if grad is None:
        return [None] * len(wanted), None
    lse, rstd, weight, *sources = ctx.saved_tensors
    source_grads, weight_grad = backward(grad, sources, weight, lse, rstd, ctx.num_heads, wanted)
    rest = iter(source_grads)
    return [next(rest) if each else None for each in wanted], weight_grad


def _op_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    sources, weight, num_heads, _ = inputs
    _save(ctx, sources, weight, num_heads, output)


def _op_backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Any, ...]:
    source_grads, weight_grad = _gradients(ctx, grad, ctx.needs_input_grad[0], depth_mix_backward)
    return source_grads, weight_grad, None, None


depth_mix.register_autograd(_op_backward, setup_context=_op_setup)


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, num_heads: int, eps: float, *sources: Tensor) -> tuple[Tensor, ...]:
        output = _forward(sources, weight, num_heads, eps)
        _save(ctx, sources, weight, num_heads, output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Any, ...]:
        # Gradients are enabled here under create_graph alone: the operator then raises when it is differentiated.
        backward = depth_mix_backward if torch.is_grad_enabled() else _backward
        source_grads, weight_grad = _gradients(ctx, grad, ctx.needs_input_grad[3:], backward)
        return weight_grad, None, None, *source_grads


def fused_read(sources: Sequence[Tensor], weight: Tensor, num_heads: int, eps: float) -> Tensor:
    """Differentiable mix (..., D) of sources (..., D) scored by weight = scale * query * norm_weight, (D,) in fp32."""
    if torch.compiler.is_compiling():
        return depth_mix(list(sources), weight, num_heads, eps)[0]
    return _Read.apply(weight, num_heads, eps, *sources)[0]
