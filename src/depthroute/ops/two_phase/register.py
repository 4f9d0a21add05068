"""The two phases as differentiable operators.

torch.compile sees custom operators, `depthroute::inter` and `depthroute::merge`, and sums the gradients that the many
readers of a source send it in one kernel. Eagerly, autograd would add them pair by pair; there the operators are plain
autograd functions that hand each source on, a view of itself, to its next reader. Backward a reader then adds its part
to what later readers sent, inside its own kernel. Both forms share their bodies, `algebra` or the kernels, and both
are functional: they keep nothing between calls.

The gradient that `inter` takes for a log-sum-exp is that of the normaliser (d lse - <d partial, partial>), which is
what `merge` gives, so its outputs may go into `merge` and nowhere else; those of an `exact` one, for which it is d lse
itself, into `gated_merge`.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from depthroute.ops.reference import accumulation_dtype
from depthroute.ops.two_phase import algebra

Optionals = Sequence[Tensor | None]


class Merged(NamedTuple):
    """What a site reads, and its sources and their rstd (the newest one's too) as later readers must take them."""

    out: Tensor
    sources: tuple[Tensor, ...]
    rstd: tuple[Tensor, ...]


def inter(
    sources: Sequence[Tensor],
    rstd: Sequence[Tensor],
    weight: Tensor,
    num_heads: int,
    kernels: bool,
    *,
    exact: bool = False,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Read N finished sources (..., D), of known rstd (..., H), for S sites of weights (S, D).

    Returns S partial mixes (..., D), their S log-sum-exps (..., H), and the sources and rstd for later readers. With
    `exact` the rounding of a partial mix does not reach the gradients of its logits; backward, many sources are then
    passed over twice.
    """
    sources, rstd = tuple(sources), tuple(rstd)
    if torch.compiler.is_compiling():
        partials, lses = inter_op(list(sources), list(rstd), weight, num_heads, kernels, exact)
        return tuple(partials), tuple(lses), sources, rstd
    if not torch.is_grad_enabled():
        partials, lses = _bodies(kernels).inter_forward(sources, rstd, weight, num_heads)
        return tuple(partials), tuple(lses), sources, rstd
    n, s = len(sources), len(weight)
    outputs = _Inter.apply(weight, num_heads, kernels, exact, n, *sources, *rstd)
    return outputs[:s], outputs[s : 2 * s], outputs[2 * s : 2 * s + n], outputs[2 * s + n :]


def merge(
    partial: Tensor | None,
    lse_in: Tensor | None,
    sources: Sequence[Tensor],
    rstd: Sequence[Tensor],
    weight: Tensor,
    num_heads: int,
    eps: float,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float = 0.0,
    kernels: bool,
) -> Merged:
    """Merge a site's part of an `inter` read, if there is one, with M >= 1 more sources (..., D), the newest last.

    rstd: (..., H) of the M - 1 older sources; eps is for that of the newest. weight: (D,). With `norm_weight` the mix
    goes through the RMSNorm that follows.
    """
    sources, rstd = tuple(sources), tuple(rstd)
    if torch.compiler.is_compiling():
        out, _, newest, _ = merge_op(
            partial, lse_in, list(sources), list(rstd), weight, norm_weight, num_heads, eps, norm_eps, kernels
        )
        return Merged(out, sources, (*rstd, newest))
    if not torch.is_grad_enabled():
        out, _, newest, _ = _bodies(kernels).merge_forward(
            partial, lse_in, sources, rstd, weight, norm_weight, num_heads, eps, norm_eps
        )
        return Merged(out, sources, (*rstd, newest))
    m = len(sources)
    out, newest, *rest = _Merge.apply(
        partial, lse_in, weight, norm_weight, num_heads, eps, norm_eps, kernels, m, *sources, *rstd
    )
    return Merged(out, tuple(rest[:m]), (*rest[m:], newest))


def _bodies(kernels: bool) -> ModuleType:
    if kernels:
        from depthroute.ops.kernels import two_phase  # imports Triton, which nothing before the first read does

        return two_phase
    return algebra


# Eager ---------------------------------------------------------------------------------------------------------------


class _Inter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, num_heads: int, kernels: bool, exact: bool, n: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        partials, lses = _bodies(kernels).inter_forward(tensors[:n], tensors[n:], weight, num_heads)
        ctx.num_heads, ctx.kernels, ctx.exact, ctx.n = num_heads, kernels, exact, n
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weight, *lses, *tensors)
        return (*partials, *lses, *(tensor.view_as(tensor) for tensor in tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        n, (weight, *tensors) = ctx.n, ctx.saved_tensors
        s = len(weight)
        lses, sources, rstd = tensors[:s], tensors[s : s + n], tensors[s + n :]
        addends, rstd_addends = grads[2 * s : 2 * s + n], grads[2 * s + n :]
        live, upstream, lse_grads = _live_sites(grads[:s], grads[s : 2 * s])
        if not live:
            return *[None] * 5, *addends, *rstd_addends
        source_grads, rstd_grads, weight_grad = _bodies(ctx.kernels).inter_backward(
            upstream, lse_grads, sources, rstd, _select(weight, live), [lses[i] for i in live], ctx.num_heads,
            addends, rstd_addends, ctx.exact,
        )  # fmt: skip
        return _spread(weight_grad, live, weight), *[None] * 4, *source_grads, *rstd_grads


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        partial: Tensor | None,
        lse_in: Tensor | None,
        weight: Tensor,
        norm_weight: Tensor | None,
        num_heads: int,
        eps: float,
        norm_eps: float,
        kernels: bool,
        m: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        out, lse, newest, raws = _bodies(kernels).merge_forward(
            partial, lse_in, tensors[:m], tensors[m:], weight, norm_weight, num_heads, eps, norm_eps
        )
        ctx.num_heads, ctx.norm_eps, ctx.kernels, ctx.m = num_heads, norm_eps, kernels, m
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(partial, lse_in, lse, newest, raws, weight, norm_weight, *tensors)
        return (out, newest, *(tensor.view_as(tensor) for tensor in tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, rstd_grad: Tensor | None, *grads: Tensor | None) -> tuple[Any, ...]:
        m, (partial, lse_in, lse, newest, raws, weight, norm_weight, *tensors) = ctx.m, ctx.saved_tensors
        if grad is None and rstd_grad is None:
            return *[None] * 9, *grads
        inter_grads, source_grads, rstd_grads, weight_grad, norm_grad = _bodies(ctx.kernels).merge_backward(
            torch.zeros_like(tensors[0]) if grad is None else grad, rstd_grad, partial, lse_in, lse, newest, raws,
            tensors[:m], tensors[m:], weight, norm_weight, ctx.num_heads, ctx.norm_eps, grads[:m], grads[m:],
        )  # fmt: skip
        first = inter_grads or (None, None)
        norm_weight_grad = None if norm_weight is None else norm_grad
        return *first, weight_grad, norm_weight_grad, *[None] * 5, *source_grads, *rstd_grads


# Compiled ------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("depthroute::inter", mutates_args=())
def inter_op(
    sources: Sequence[Tensor], rstd: Sequence[Tensor], weight: Tensor, num_heads: int, kernels: bool, exact: bool
) -> tuple[list[Tensor], list[Tensor]]:
    return _bodies(kernels).inter_forward(sources, rstd, weight, num_heads)


@inter_op.register_fake
def _(
    sources: Sequence[Tensor], rstd: Sequence[Tensor], weight: Tensor, num_heads: int, kernels: bool, exact: bool
) -> tuple[list[Tensor], list[Tensor]]:
    sites = range(weight.shape[0])
    return [_row_like(sources[0]) for _ in sites], [_stat_like(sources[0], num_heads) for _ in sites]


@torch.library.custom_op("depthroute::inter_backward", mutates_args=())
def inter_backward_op(
    grads: Sequence[Tensor],
    lse_grads: Sequence[Tensor],
    sources: Sequence[Tensor],
    rstd: Sequence[Tensor],
    weight: Tensor,
    lses: Sequence[Tensor],
    num_heads: int,
    kernels: bool,
    exact: bool,
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    return _bodies(kernels).inter_backward(grads, lse_grads, sources, rstd, weight, lses, num_heads, exact=exact)


@inter_backward_op.register_fake
def _(
    grads: Sequence[Tensor],
    lse_grads: Sequence[Tensor],
    sources: Sequence[Tensor],
    rstd: Sequence[Tensor],
    weight: Tensor,
    lses: Sequence[Tensor],
    num_heads: int,
    kernels: bool,
    exact: bool,
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    stats = [_stat_like(source, num_heads) for source in sources]
    return [_row_like(source) for source in sources], stats, weight.new_empty(weight.shape)


def _inter_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    sources, rstd, weight, ctx.num_heads, ctx.kernels, ctx.exact = inputs
    ctx.n = len(sources)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(weight, *output[1], *sources, *rstd)


def _inter_backward(ctx: Any, grads: Optionals, lse_grads: Optionals) -> tuple[Any, ...]:
    n, (weight, *tensors) = ctx.n, ctx.saved_tensors
    s = len(grads)
    lses, sources, rstd = tensors[:s], tensors[s : s + n], tensors[s + n :]
    live, upstream, lse_grads = _live_sites(grads, lse_grads)
    if not live:
        return [None] * n, [None] * n, *[None] * 4
    source_grads, rstd_grads, weight_grad = inter_backward_op(
        upstream, lse_grads, sources, rstd, _select(weight, live), [lses[i] for i in live], ctx.num_heads, ctx.kernels,
        ctx.exact,
    )  # fmt: skip
    return source_grads, rstd_grads, _spread(weight_grad, live, weight), *[None] * 3


inter_op.register_autograd(_inter_backward, setup_context=_inter_setup)


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
    return _bodies(kernels).merge_forward(partial, lse_in, sources, rstd, weight, norm_weight, num_heads, eps, norm_eps)


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
    stat = _stat_like(sources[0], num_heads)
    return _row_like(sources[0]), stat, torch.empty_like(stat), stat.new_empty((len(sources), *stat.shape))


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
    kernels: bool,
) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor, Tensor]:
    return _bodies(kernels).merge_backward(
        grad, rstd_grad, partial, lse_in, lse, newest, raws, sources, rstd, weight, norm_weight, num_heads, norm_eps
    )


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
    kernels: bool,
) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor, Tensor]:
    inter_grads = [] if partial is None else [_row_like(partial), _stat_like(partial, num_heads)]
    norm_grad = grad.new_empty(0) if norm_weight is None else norm_weight.new_empty(norm_weight.shape)
    return (
        inter_grads,
        [_row_like(source) for source in sources],
        [_stat_like(grad, num_heads) for _ in rstd],
        weight.new_empty(weight.shape),
        norm_grad,
    )


def _merge_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    partial, lse_in, sources, rstd, weight, norm_weight, ctx.num_heads, _, ctx.norm_eps, ctx.kernels = inputs
    _, lse, newest, raws = output
    ctx.m, ctx.normed = len(sources), norm_weight is not None
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(lse, raws)
    ctx.save_for_backward(partial, lse_in, lse, newest, raws, weight, norm_weight, *sources, *rstd)


def _merge_backward(ctx: Any, grad: Tensor | None, _: None, rstd_grad: Tensor | None, __: None) -> tuple[Any, ...]:
    m, (partial, lse_in, lse, newest, raws, weight, norm_weight, *tensors) = ctx.m, ctx.saved_tensors
    if grad is None and rstd_grad is None:
        return None, None, [None] * m, [None] * (m - 1), *[None] * 6
    inter_grads, source_grads, rstd_grads, weight_grad, norm_grad = merge_backward_op(
        torch.zeros_like(tensors[0]) if grad is None else grad, rstd_grad, partial, lse_in, lse, newest, raws,
        tensors[:m], tensors[m:], weight, norm_weight, ctx.num_heads, ctx.norm_eps, ctx.kernels,
    )  # fmt: skip
    d_partial, d_normaliser = inter_grads or (None, None)
    norm_weight_grad = norm_grad if ctx.normed else None
    return d_partial, d_normaliser, source_grads, rstd_grads, weight_grad, norm_weight_grad, *[None] * 4


merge_op.register_autograd(_merge_backward, setup_context=_merge_setup)


# Both ----------------------------------------------------------------------------------------------------------------


def _live_sites(grads: Optionals, lse_grads: Optionals) -> tuple[list[int], list[Tensor], list[Tensor]]:
    """The sites of a tile that got a gradient, and their gradients. After a partial backward not all have one."""
    live = [site for site, grad in enumerate(grads) if grad is not None]
    return live, [grads[site] for site in live], [lse_grads[site] for site in live]  # type: ignore[misc]


def _select(weight: Tensor, live: list[int]) -> Tensor:
    return weight if len(live) == len(weight) else torch.stack([weight[site] for site in live])


def _spread(weight_grad: Tensor, live: list[int], weight: Tensor) -> Tensor:
    if len(live) == len(weight):
        return weight_grad
    rows = dict(zip(live, weight_grad, strict=True))
    nothing = torch.zeros_like(weight_grad[0])
    return torch.stack([rows.get(site, nothing) for site in range(len(weight))])


def _row_like(source: Tensor) -> Tensor:
    return source.new_empty(source.shape)


def _stat_like(source: Tensor, num_heads: int) -> Tensor:
    return source.new_empty((*source.shape[:-1], num_heads), dtype=accumulation_dtype(source.dtype))
