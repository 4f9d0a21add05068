"""The bodies of the two phases as operators that torch.compile takes whole, with the signatures of `algebra`."""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from depthroute.ops.reference import accumulation_dtype
from depthroute.ops.two_phase import algebra


def bodies(kernels: bool) -> ModuleType:
    """What computes the two phases: Triton, or plain PyTorch."""
    if kernels:
        from depthroute.ops.kernels import two_phase  # imports Triton, which nothing before the first read does

        return two_phase
    return algebra


class Operators:
    """What `bodies` gives, as operators; a list of tensors must be a list."""

    def __init__(self, kernels: bool) -> None:
        self.kernels = kernels

    def inter_forward(
        self, sources: Sequence[Tensor], rstd: Sequence[Tensor], weight: Tensor, num_heads: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        return inter_op(list(sources), list(rstd), weight, num_heads, self.kernels)

    def inter_backward(self, *arguments: Any) -> tuple[list[Tensor], list[Tensor], Tensor]:
        return inter_backward_op(*map(_listed, arguments), self.kernels)

    def merge_forward(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return merge_op(*map(_listed, arguments), self.kernels)

    def merge_backward(self, *arguments: Any) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor, Tensor]:
        return merge_backward_op(*map(_listed, arguments), self.kernels)

    def weight_parts(self, *arguments: Any) -> tuple[int, int]:
        parts: tuple[int, int] = bodies(self.kernels).weight_parts(*arguments)
        return parts

    def sum_weights(self, inter_parts: Tensor | None, merge_parts: Sequence[Tensor | None]) -> Tensor:
        return sum_weights_op(inter_parts, list(merge_parts), self.kernels)

    def gated_forward(self, *arguments: Any) -> Tensor:
        return gated_op(*arguments, self.kernels)

    def gated_backward(self, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return gated_backward_op(*arguments, self.kernels)


def _listed(argument: Any) -> Any:
    return list(argument) if isinstance(argument, tuple) else argument


@torch.library.custom_op("depthroute::inter", mutates_args=())
def inter_op(
    sources: Sequence[Tensor], rstd: Sequence[Tensor], weight: Tensor, num_heads: int, kernels: bool
) -> tuple[list[Tensor], list[Tensor]]:
    return bodies(kernels).inter_forward(sources, rstd, weight, num_heads)


@inter_op.register_fake
def _(
    sources: Sequence[Tensor], rstd: Sequence[Tensor], weight: Tensor, num_heads: int, kernels: bool
) -> tuple[list[Tensor], list[Tensor]]:
    sites = range(weight.shape[0])
    return [row_like(sources[0]) for _ in sites], [stat_like(sources[0], num_heads) for _ in sites]


@torch.library.custom_op("depthroute::inter_backward", mutates_args=())
def inter_backward_op(
    grads: Sequence[Tensor],
    lse_grads: Sequence[Tensor],
    sources: Sequence[Tensor],
    rstd: Sequence[Tensor],
    weight: Tensor,
    lses: Sequence[Tensor],
    num_heads: int,
    addends: Sequence[Tensor | None],
    rstd_addends: Sequence[Tensor | None],
    exact: bool,
    parts: int | None,
    kernels: bool,
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    return bodies(kernels).inter_backward(
        grads, lse_grads, sources, rstd, weight, lses, num_heads, addends, rstd_addends, exact, parts
    )


@inter_backward_op.register_fake
def _(
    grads: Sequence[Tensor],
    lse_grads: Sequence[Tensor],
    sources: Sequence[Tensor],
    rstd: Sequence[Tensor],
    weight: Tensor,
    lses: Sequence[Tensor],
    num_heads: int,
    addends: Sequence[Tensor | None],
    rstd_addends: Sequence[Tensor | None],
    exact: bool,
    parts: int | None,
    kernels: bool,
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    stats = [stat_like(source, num_heads) for source in sources]
    return [row_like(source) for source in sources], stats, in_parts_like(weight, parts)


@torch.library.custom_op("depthroute::merge", mutates_args=())
def merge_op(
    partial: Tensor | None,
    lse_in: Tensor | None,
    sources: Sequence[Tensor],
    rstd: Sequence[Tensor],
    weight: Tensor,
    norm_weight: Tensor | None,
    num_heads: int,
    eps: float,
    norm_eps: float,
    kernels: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return bodies(kernels).merge_forward(partial, lse_in, sources, rstd, weight, norm_weight, num_heads, eps, norm_eps)


@merge_op.register_fake
def _(
    partial: Tensor | None,
    lse_in: Tensor | None,
    sources: Sequence[Tensor],
    rstd: Sequence[Tensor],
    weight: Tensor,
    norm_weight: Tensor | None,
    num_heads: int,
    eps: float,
    norm_eps: float,
    kernels: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    stat = stat_like(sources[0], num_heads)
    return row_like(sources[0]), stat, torch.empty_like(stat), stat.new_empty((len(sources), *stat.shape))


@torch.library.custom_op("depthroute::merge_backward", mutates_args=())
def merge_backward_op(
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
    addends: Sequence[Tensor | None],
    rstd_addends: Sequence[Tensor | None],
    parts: int | None,
    kernels: bool,
) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor, Tensor]:
    return bodies(kernels).merge_backward(
        grad, rstd_grad, partial, lse_in, lse, newest, raws, sources, rstd, weight, norm_weight, num_heads, norm_eps,
        addends, rstd_addends, parts,
    )  # fmt: skip


@merge_backward_op.register_fake
def _(
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
    addends: Sequence[Tensor | None],
    rstd_addends: Sequence[Tensor | None],
    parts: int | None,
    kernels: bool,
) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor, Tensor]:
    inter_grads = [] if partial is None else [row_like(partial), stat_like(partial, num_heads)]
    norm_grad = grad.new_empty(0) if norm_weight is None else norm_weight.new_empty(norm_weight.shape)
    return (
        inter_grads,
        [row_like(source) for source in sources],
        [stat_like(grad, num_heads) for _ in rstd],
        in_parts_like(weight, parts),
        norm_grad,
    )


@torch.library.custom_op("depthroute::sum_weights", mutates_args=())
def sum_weights_op(inter_parts: Tensor | None, merge_parts: Sequence[Tensor | None], kernels: bool) -> Tensor:
    return bodies(kernels).sum_weights(inter_parts, merge_parts)


@sum_weights_op.register_fake
def _(inter_parts: Tensor | None, merge_parts: Sequence[Tensor | None], kernels: bool) -> Tensor:
    there = next(part for part in (*merge_parts, inter_parts) if part is not None)
    return there.new_empty((len(merge_parts), there.shape[-1]))


@torch.library.custom_op("depthroute::gated_merge", mutates_args=())
def gated_op(
    stream: Tensor,
    partial: Tensor,
    lse_in: Tensor,
    null: Tensor,
    logits_and_gate: Tensor,
    num_heads: int,
    kernels: bool,
) -> Tensor:
    return bodies(kernels).gated_forward(stream, partial, lse_in, null, logits_and_gate, num_heads)


@gated_op.register_fake
def _(
    stream: Tensor,
    partial: Tensor,
    lse_in: Tensor,
    null: Tensor,
    logits_and_gate: Tensor,
    num_heads: int,
    kernels: bool,
) -> Tensor:
    return row_like(stream)


@torch.library.custom_op("depthroute::gated_merge_backward", mutates_args=())
def gated_backward_op(
    grad: Tensor, partial: Tensor, lse_in: Tensor, null: Tensor, logits_and_gate: Tensor, num_heads: int, kernels: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return bodies(kernels).gated_backward(grad, partial, lse_in, null, logits_and_gate, num_heads)


@gated_backward_op.register_fake
def _(
    grad: Tensor, partial: Tensor, lse_in: Tensor, null: Tensor, logits_and_gate: Tensor, num_heads: int, kernels: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    own = logits_and_gate.new_empty(logits_and_gate.shape)
    return row_like(partial), stat_like(partial, num_heads), null.new_empty(null.shape), own


def row_like(source: Tensor) -> Tensor:
    return source.new_empty(source.shape)


def in_parts_like(weight: Tensor, parts: int | None) -> Tensor:
    return weight.new_empty(weight.shape if parts is None else (parts, *weight.shape))


def stat_like(source: Tensor, num_heads: int) -> Tensor:
    return source.new_empty((*source.shape[:-1], num_heads), dtype=accumulation_dtype(source.dtype))
