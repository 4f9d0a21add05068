"""The two phases as differentiable operators, `inter` and `merge`, and `gated`, a merge beside a stream.

Each is an autograd function that hands its sources and their rstd on, views of themselves, to their next reader:
backward, a reader adds its part to what later readers sent inside its own kernel. Under torch.compile the same function
is traced with custom operators for its bodies, so that kernels stay whole; sources are not handed on there, since the
compiler sums all gradients of one in one kernel, with whatever comes before it. Bodies are those of `algebra` or the
kernels, and all of it is functional: nothing is kept between calls.

The gradient that `inter` takes for a log-sum-exp is that of the normaliser (d lse - <d partial, partial>), which is
what `merge` gives, so its outputs may go into `merge` and nowhere else; those of an `exact` one, for which it is d lse
itself, into `gated`.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from depthroute.ops import reference
from depthroute.ops.two_phase import operators
from depthroute.ops.two_phase.operators import Operators, bodies

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

    The weights may be the (B, S, D) of `spread`. Returns S partial mixes (..., D), their S log-sum-exps (..., H), and
    the sources and rstd for later readers. With `exact` the rounding of a partial mix does not reach the gradients of
    its logits; backward, many sources are then passed over twice.
    """
    n, s = len(sources), weight.shape[-2]
    if not torch.is_grad_enabled():
        weight, _ = _one_copy(weight, 2)
        partials, lses = _operators(kernels).inter_forward(tuple(sources), tuple(rstd), weight, num_heads)
        return tuple(partials), tuple(lses), tuple(sources), tuple(rstd)
    outputs = _apply("inter", kernels, weight, num_heads, exact, n, *sources, *rstd)
    later = _for_later_readers(sources, outputs[2 * s : 2 * s + n])
    return outputs[:s], outputs[s : 2 * s], later, outputs[2 * s + n :]


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

    rstd: (..., H) of the M - 1 older sources; eps is for that of the newest. weight: (D,), or (P, D) of `spread`. With
    `norm_weight` the mix goes through the RMSNorm that follows.
    """
    if not torch.is_grad_enabled():
        weight, _ = _one_copy(weight, 1)
        out, _, newest, _ = _operators(kernels).merge_forward(
            partial, lse_in, tuple(sources), tuple(rstd), weight, norm_weight, num_heads, eps, norm_eps
        )
        return Merged(out, tuple(sources), (*rstd, newest))
    m = len(sources)
    out, newest, *rest = _apply(
        "merge", kernels, partial, lse_in, weight, norm_weight, num_heads, eps, norm_eps, m, *sources, *rstd
    )
    return Merged(out, _for_later_readers(sources, rest[:m]), (*rest[m:], newest))


def spread(weight: Tensor, like: Tensor, num_heads: int, kernels: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Weights (S, D) of the sites of a tile, as an inter read of sources `like` takes them, and each as its merge does.

    They are views in which each program of a backward has a copy of its own, (B, S, D) and S times (P, D), so what it
    sums for its tokens is the gradient of that copy. All copies are summed by one kernel for the whole tile, not by one
    for each read.
    """
    for_inter, *for_merges = _apply("spread", kernels, weight, like.dtype, num_heads)
    return for_inter, tuple(for_merges)


def _for_later_readers(sources: Sequence[Tensor], handed_on: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(sources if torch.compiler.is_compiling() else handed_on)


def gated(
    stream: Tensor,
    partial: Tensor,
    lse_in: Tensor,
    null: Tensor,
    logits_and_gate: Tensor,
    num_heads: int,
    kernels: bool,
) -> Tensor:
    """stream + gate * mix (..., D), as `algebra.gated_forward`; partial and lse_in are those of an `exact` `inter`."""
    tensors = (partial, lse_in, null, logits_and_gate)
    if not torch.is_grad_enabled():
        return _operators(kernels).gated_forward(stream, *tensors, num_heads)
    return _apply("gated", kernels, num_heads, stream, *tensors)


def _operators(kernels: bool) -> Any:
    return Operators(kernels) if torch.compiler.is_compiling() else bodies(kernels)


def _apply(name: str, kernels: bool, *inputs: Any) -> Any:
    if torch.compiler.is_compiling():
        return _traced(name, kernels, *inputs)
    return _FUNCTIONS[name].apply(bodies(kernels), *inputs)


@torch.compiler.allow_in_graph
def _traced(name: str, kernels: bool, *inputs: Any) -> Any:
    """torch.compile leaves this call whole; the tracer behind it runs it, backward too, on what stands for tensors."""
    return _FUNCTIONS[name].apply(Operators(kernels), *inputs)


def _keep_graphs() -> None:
    """Let the compiler keep graphs with such calls from one process to the next, as it does with operators.

    They depend on nothing but the arguments of a call and what the code here makes of them, which names the graphs.
    """
    from torch._inductor import config

    try:
        code = "".join(inspect.getsource(module) for module in (sys.modules[__name__], operators, reference))
    except OSError:  # nobody can read it: graphs are made anew in each process
        return
    name = f"{_traced.__module__}.{_traced.__name__}"
    kept = {**config.unsafe_marked_cacheable_functions, name: sha256(code.encode()).hexdigest()}
    config.unsafe_marked_cacheable_functions = kept


_keep_graphs()


def _once(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """A backward that is refused where its gradients are to be differentiated in turn.

    `once_differentiable` alone would take them for constants, without a word, where nothing upstream has a gradient.
    """
    only = once_differentiable(backward)

    def checked(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("reads over depth have no second derivative, and create_graph=True asks for one")
        return only(ctx, *grads)

    return checked


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bodies: Any, weight: Tensor, dtype: torch.dtype, num_heads: int) -> tuple[Tensor, ...]:
        of_inter, of_merge = bodies.weight_parts(*weight.shape, num_heads, dtype)
        ctx.bodies = bodies
        ctx.set_materialize_grads(False)
        return weight.expand(of_inter, *weight.shape), *(row.expand(of_merge, *row.shape) for row in weight)

    @staticmethod
    @_once
    def backward(ctx: Any, inter_parts: Tensor | None, *merge_parts: Tensor | None) -> tuple[Any, ...]:
        nothing = inter_parts is None and all(part is None for part in merge_parts)
        return None, None if nothing else ctx.bodies.sum_weights(inter_parts, merge_parts), None, None


def _one_copy(weight: Tensor, dimensions: int) -> tuple[Tensor, int | None]:
    """A weight of so many dimensions, and of how many copies of it its gradient is that; None if it is not spread."""
    return (weight, None) if weight.dim() == dimensions else (weight[0], len(weight))


class _Inter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, bodies: Any, weight: Tensor, num_heads: int, exact: bool, n: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        weight, ctx.parts = _one_copy(weight, 2)
        partials, lses = bodies.inter_forward(tensors[:n], tensors[n:], weight, num_heads)
        ctx.bodies, ctx.num_heads, ctx.exact, ctx.n = bodies, num_heads, exact, n
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weight, *lses, *tensors)
        return (*partials, *lses, *(tensor.view_as(tensor) for tensor in tensors))

    @staticmethod
    @_once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        n, (weight, *tensors) = ctx.n, ctx.saved_tensors
        s = len(weight)
        lses, sources, rstd = tensors[:s], tensors[s : s + n], tensors[s + n :]
        addends, rstd_addends = grads[2 * s : 2 * s + n], grads[2 * s + n :]
        live, upstream, lse_grads = _live_sites(grads[:s], grads[s : 2 * s])
        if not live:
            return *[None] * 5, *addends, *rstd_addends
        source_grads, rstd_grads, weight_grad = ctx.bodies.inter_backward(
            upstream, lse_grads, sources, rstd, _select(weight, live), [lses[i] for i in live], ctx.num_heads,
            addends, rstd_addends, ctx.exact, ctx.parts,
        )  # fmt: skip
        return None, _for_all_sites(weight_grad, live, s), *[None] * 3, *source_grads, *rstd_grads


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        bodies: Any,
        partial: Tensor | None,
        lse_in: Tensor | None,
        weight: Tensor,
        norm_weight: Tensor | None,
        num_heads: int,
        eps: float,
        norm_eps: float,
        m: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        weight, ctx.parts = _one_copy(weight, 1)
        out, lse, newest, raws = bodies.merge_forward(
            partial, lse_in, tensors[:m], tensors[m:], weight, norm_weight, num_heads, eps, norm_eps
        )
        ctx.bodies, ctx.num_heads, ctx.norm_eps, ctx.m = bodies, num_heads, norm_eps, m
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(partial, lse_in, lse, newest, raws, weight, norm_weight, *tensors)
        return (out, newest, *(tensor.view_as(tensor) for tensor in tensors))

    @staticmethod
    @_once
    def backward(ctx: Any, grad: Tensor | None, rstd_grad: Tensor | None, *grads: Tensor | None) -> tuple[Any, ...]:
        m, (partial, lse_in, lse, newest, raws, weight, norm_weight, *tensors) = ctx.m, ctx.saved_tensors
        if grad is None and rstd_grad is None:
            return *[None] * 9, *grads
        inter_grads, source_grads, rstd_grads, weight_grad, norm_grad = ctx.bodies.merge_backward(
            torch.zeros_like(tensors[0]) if grad is None else grad, rstd_grad, partial, lse_in, lse, newest, raws,
            tensors[:m], tensors[m:], weight, norm_weight, ctx.num_heads, ctx.norm_eps, grads[:m], grads[m:],
            ctx.parts,
        )  # fmt: skip
        first = inter_grads or (None, None)
        norm_weight_grad = None if norm_weight is None else norm_grad
        return None, *first, weight_grad, norm_weight_grad, *[None] * 4, *source_grads, *rstd_grads


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bodies: Any, num_heads: int, stream: Tensor, *tensors: Tensor) -> Tensor:
        ctx.bodies, ctx.num_heads = bodies, num_heads
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        return bodies.gated_forward(stream, *tensors, num_heads)

    @staticmethod
    @_once
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        if grad is None:
            return (None,) * 7
        return None, None, grad, *ctx.bodies.gated_backward(grad, *ctx.saved_tensors, ctx.num_heads)


_FUNCTIONS: dict[str, Any] = {"spread": _Spread, "inter": _Inter, "merge": _Merge, "gated": _Gated}


def _live_sites(grads: Optionals, lse_grads: Optionals) -> tuple[list[int], list[Tensor], list[Tensor]]:
    """The sites of a tile that got a gradient, and their gradients. After a partial backward not all have one."""
    live = [site for site, grad in enumerate(grads) if grad is not None]
    return live, [grads[site] for site in live], [lse_grads[site] for site in live]  # type: ignore[misc]


def _select(weight: Tensor, live: list[int]) -> Tensor:
    return weight if len(live) == len(weight) else torch.stack([weight[site] for site in live])


def _for_all_sites(weight_grad: Tensor, live: list[int], count: int) -> Tensor:
    """The weights' gradient (..., S, D): zero for sites that got none."""
    if len(live) == count:
        return weight_grad
    grad = weight_grad.new_zeros((*weight_grad.shape[:-2], count, weight_grad.shape[-1]))
    grad[..., live, :] = weight_grad
    return grad
