"""The two phases of a depth read and their gradients in plain PyTorch: what the kernels are held to.

Shapes: sources, partial mixes and mixes (..., D); rstd, log-sum-exps and their gradients (..., H). `rstd`, the inverse
rms of a row, is the same for every head: it is kept once for each, so that each head's gradient has a place of its own.
Arithmetic is in fp32 (fp64 for fp64 sources); only rows are rounded.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from depthroute.ops.reference import accumulation_dtype


def _by_head(rows: Tensor, num_heads: int) -> Tensor:
    """(..., D) -> (..., H, K) in the type of the arithmetic."""
    return rows.to(accumulation_dtype(rows.dtype)).unflatten(-1, (num_heads, -1))


def _rows(by_head: Tensor, like: Tensor) -> Tensor:
    """(..., H, K) -> (..., D), rounded once."""
    return by_head.flatten(-2).to(like.dtype, copy=True, memory_format=torch.contiguous_format)


def _plus(value: Tensor, addend: Tensor | None) -> Tensor:
    return value if addend is None else value + addend


def inter_forward(
    sources: Sequence[Tensor], rstd: Sequence[Tensor], weight: Tensor, num_heads: int
) -> tuple[list[Tensor], list[Tensor]]:
    """N sources read by S sites of weights (S, D) -> S mixes, normalised, and S log-sum-exps."""
    values = torch.stack([_by_head(source, num_heads) for source in sources])  # (N, ..., H, K)
    partials, lses = [], []
    for row in _by_head(weight, num_heads):
        logits = (values * row).sum(-1) * torch.stack(list(rstd))  # (N, ..., H)
        lse = torch.logsumexp(logits, 0)
        weights = torch.exp(logits - lse)
        partials.append(_rows((weights.unsqueeze(-1) * values).sum(0), sources[0]))
        lses.append(lse)
    return partials, lses


def inter_backward(
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
    """Gradients of the sources (plus `addends`), of their rstd (plus `rstd_addends`) and of the weights (S, D).

    `lse_grads` are those of the normalisers, d lse - <d partial, partial>, so that no partial mix is needed. `exact`:
    they are d lse, and the rest is made here, of the partial mix as it was before it was rounded. `parts`: that of the
    weights is left as so many parts (parts, S, D), of which it is the sum.
    """
    weights = _by_head(weight, num_heads)
    upstream = [_by_head(grad, num_heads) for grad in grads]
    normaliser_grads = list(lse_grads)
    if exact:
        for source, r in zip(sources, rstd, strict=True):
            value = _by_head(source, num_heads)
            for s, (g, lse) in enumerate(zip(upstream, lses, strict=True)):
                p = torch.exp((value * weights[s]).sum(-1) * r - lse)
                normaliser_grads[s] = normaliser_grads[s] - p * (g * value).sum(-1)
    weight_grad = torch.zeros_like(weights)
    source_grads, rstd_grads = [], []
    for n, (source, r) in enumerate(zip(sources, rstd, strict=True)):
        value = _by_head(source, num_heads)
        total, r_total = torch.zeros_like(value), torch.zeros_like(r)
        for s, (g, dz, lse) in enumerate(zip(upstream, normaliser_grads, lses, strict=True)):
            raw = (value * weights[s]).sum(-1)
            p = torch.exp(raw * r - lse)
            dl = p * ((g * value).sum(-1) + dz)
            u = (dl * r).unsqueeze(-1)
            total += p.unsqueeze(-1) * g + u * weights[s]
            r_total += dl * raw
            weight_grad[s] += (u * value).flatten(0, -3).sum(0)
        addend = addends[n] if addends else None
        source_grads.append(_rows(_plus(total, None if addend is None else _by_head(addend, num_heads)), source))
        rstd_grads.append(_plus(r_total, rstd_addends[n] if rstd_addends else None))
    return source_grads, rstd_grads, _in_parts(weight_grad.flatten(1), parts)


def merge_forward(
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
    """One site: its part of the inter read, if there was one, and M sources, the newest the last.

    `rstd` is that of the M - 1 older ones, `weight` (D,) that of the site. Returns what it reads, which is the mix, or
    the RMSNorm of the mix where there is a `norm_weight`; its log-sum-exps; the rstd of the newest source; and for the
    backward the inner products of weight and sources (M, ..., H), the newest first.
    """
    row = _by_head(weight, num_heads)
    values = [_by_head(source, num_heads) for source in sources]
    mean_square = values[-1].square().mean((-2, -1))
    newest = torch.rsqrt(mean_square + eps).unsqueeze(-1).expand(values[-1].shape[:-1]).clone()
    raws = [(value * row).sum(-1) for value in values]
    logits = [raw * r for raw, r in zip(raws, [*rstd, newest], strict=True)]
    if partial is not None and lse_in is not None:
        logits.append(lse_in)
        values.append(_by_head(partial, num_heads))
    lse = torch.logsumexp(torch.stack(logits), 0)
    total = torch.zeros_like(values[0])
    for logit, value in zip(logits, values, strict=True):
        total = total + torch.exp(logit - lse).unsqueeze(-1) * value
    mix = _rows(total, sources[0])
    out = mix if norm_weight is None else rms_norm(mix, norm_weight, norm_eps)
    return out, lse, newest, torch.stack(raws[::-1])


def merge_backward(
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
    """Gradients under `grad`, that of what the site read.

    `rstd_grad` is the gradient that later readers gave the newest source's rstd. Returns [d partial, d normaliser] or
    [], M source gradients (plus `addends`), M - 1 rstd gradients (plus `rstd_addends`), the weight's (D,), or its parts
    (parts, D), and the norm weight's (empty without a norm).

    The mix is made again rather than kept: as it was rounded it would bring its rounding into every gradient of a
    logit, and those nearly cancel in a query's gradient.
    """
    row = _by_head(weight, num_heads)
    values = [_by_head(source, num_heads) for source in sources]
    products = raws.flip(0).unbind(0)
    weights = [torch.exp(raw * r - lse) for raw, r in zip(products, [*rstd, newest], strict=True)]
    mix = torch.zeros_like(values[0])
    for p, value in zip(weights, values, strict=True):
        mix = mix + p.unsqueeze(-1) * value
    if partial is not None and lse_in is not None:
        p_in, value_in = torch.exp(lse_in - lse), _by_head(partial, num_heads)
        mix = mix + p_in.unsqueeze(-1) * value_in
    g = _by_head(grad, num_heads)
    norm_grad = grad.new_empty(0)
    if norm_weight is not None:
        g, norm_grad = _rms_norm_backward(grad, _rows(mix, sources[0]), norm_weight, norm_eps)
        g = g.unflatten(-1, (num_heads, -1))
    delta = (g * mix).sum(-1)
    inter: list[Tensor] = []
    if partial is not None and lse_in is not None:
        lse_grad = p_in * ((g * value_in).sum(-1) - delta)
        d_partial = _rows(p_in.unsqueeze(-1) * g, partial)
        # From the gradient as it is rounded: the inter read has no other.
        inter = [d_partial, lse_grad - (_by_head(d_partial, num_heads) * value_in).sum(-1)]
    weight_grad = torch.zeros_like(weight, memory_format=torch.contiguous_format)
    source_grads, rstd_grads = [], []
    for i, (value, raw, p, r) in enumerate(zip(values, products, weights, [*rstd, newest], strict=True)):
        dl = p * ((g * value).sum(-1) - delta)
        u = (dl * r).unsqueeze(-1)
        d = p.unsqueeze(-1) * g + u * row
        dr = dl * raw
        weight_grad += (u * value).flatten(-2).reshape(-1, weight.shape[-1]).sum(0)
        if i == len(values) - 1:  # its rstd is born here, so the gradient through it is applied here, once
            total = _plus(dr, rstd_grad).sum(-1, keepdim=True) / weight.shape[-1]
            d = d - (r.pow(3) * total).unsqueeze(-1) * value
        else:
            rstd_grads.append(_plus(dr, rstd_addends[i] if rstd_addends else None))
        addend = addends[i] if addends else None
        source_grads.append(_rows(_plus(d, None if addend is None else _by_head(addend, num_heads)), sources[i]))
    return inter, source_grads, rstd_grads, _in_parts(weight_grad, parts), norm_grad


def _in_parts(grad: Tensor, parts: int | None) -> Tensor:
    """A gradient as the first of so many parts, the others zero."""
    if parts is None:
        return grad
    return torch.cat([grad.unsqueeze(0), grad.new_zeros((parts - 1, *grad.shape))])


def weight_parts(num_sites: int, width: int, num_heads: int, dtype: torch.dtype) -> tuple[int, int]:
    """As how many parts the weights' gradients are best left: by an inter read for so many sites, and by a merge."""
    return 1, 1


def sum_weights(inter_parts: Tensor | None, merge_parts: Sequence[Tensor | None]) -> Tensor:
    """The weights' gradients (S, D): the sum of the parts of an inter read (B, S, D) and of S merges, each (P, D)."""
    there = next(part for part in (*merge_parts, inter_parts) if part is not None)
    rows = [there.new_zeros(there.shape[-1]) if part is None else part.sum(0) for part in merge_parts]
    return torch.stack(rows) if inter_parts is None else torch.stack(rows) + inter_parts.sum(0)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm as the decoders of transformers round it: in fp32, to the dtype of x, then times the weight."""
    rows = x.to(accumulation_dtype(x.dtype))
    rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    return (weight * rows.to(x.dtype)).to(x.dtype)


def _rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of x, not rounded, and of the weight."""
    dtype = accumulation_dtype(x.dtype)
    grad, rows = grad.to(dtype), x.to(dtype)
    rho = torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    scaled = grad * weight.to(dtype)
    x_grad = rho * scaled - rows * rho.pow(3) * (scaled * rows).mean(-1, keepdim=True)
    weight_grad = (grad * rows * rho).reshape(-1, rows.shape[-1]).sum(0)
    return x_grad, weight_grad.to(weight.dtype)


def gated_forward(
    stream: Tensor, partial: Tensor, lse_in: Tensor, null: Tensor, logits_and_gate: Tensor, num_heads: int
) -> Tensor:
    """stream + gate * mix, where mix merges a partial mix with one vector (D,) of logits (H,) that all tokens share.

    logits_and_gate: those logits, then the gate; what follows is padding.
    """
    mix, _, _ = _gated_mix(partial, lse_in, null, logits_and_gate[:num_heads], num_heads)
    # Rounded as two separate operations would be.
    gate = logits_and_gate[num_heads].to(stream.dtype)
    return stream + gate * _rows(mix, partial).to(stream.dtype)


def gated_backward(
    grad: Tensor, partial: Tensor, lse_in: Tensor, null: Tensor, logits_and_gate: Tensor, num_heads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of partial, lse_in, null and logits_and_gate; that of the stream is `grad` itself."""
    mix, p, q = _gated_mix(partial, lse_in, null, logits_and_gate[:num_heads], num_heads)
    g = _by_head(grad, num_heads)
    gate_grad = (g * mix).sum()
    g = g * logits_and_gate[num_heads].to(g.dtype)
    delta = (g * mix).sum(-1)
    d_partial = _rows(p.unsqueeze(-1) * g, partial)
    lse_grad = p * ((g * _by_head(partial, num_heads)).sum(-1) - delta)
    null_grad = (q.unsqueeze(-1) * g).flatten(-2).reshape(-1, null.numel()).sum(0)
    own_grad = torch.zeros_like(logits_and_gate)
    own_grad[:num_heads] = (q * ((g * _by_head(null, num_heads)).sum(-1) - delta)).reshape(-1, num_heads).sum(0)
    own_grad[num_heads] = gate_grad
    return d_partial, lse_grad, null_grad.to(null.dtype), own_grad


def _gated_mix(
    partial: Tensor, lse_in: Tensor, null: Tensor, null_logit: Tensor, num_heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """mix (..., H, K), and the weights (..., H) of the partial mix and of the null vector in it."""
    lse = torch.logaddexp(lse_in, null_logit)
    p, q = torch.exp(lse_in - lse), torch.exp(null_logit - lse)
    return p.unsqueeze(-1) * _by_head(partial, num_heads) + q.unsqueeze(-1) * _by_head(null, num_heads), p, q
