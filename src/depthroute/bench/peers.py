"""Other packages' operators for single-head attention residuals, as arms of `bench route`.

Each package is imported when its arm runs. What their operators take, as of the versions looked at:

    package, version              operator                             sources               norm weight, query
    flash-attn-res 0.1.12         phase_1_batched_attention_triton_op  stacked (N, B, T, D)  none, (Q, D)
    fast-attnres 2.1.0            attnres                              stacked or a list     none, (D,) in bf16
    flash-linear-attention 0.6.0  fused_attnres                        a list                (D,), (D,)
    liger-kernel 0.8.5            liger_attn_res                       stacked (N, ..., D)   (D,), (D,)

All norm the keys themselves and take the eps. Where an operator takes no norm weight it is multiplied into the query;
where it takes stacked sources alone, stacking them is part of its time. flash-attn-res reads as its first phase does,
one query at a time: its second phase merges one source only. It and liger-kernel sum query gradients by atomic adds, so
two runs of theirs may differ. What each cannot run is said by `obstacle`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from depthroute.bench.chains import Shape, Site

EPS = 1e-6
Sources = Sequence[Tensor]


@dataclass(frozen=True)
class Peer:
    """One package's operator.

    distribution, module, operator: what has to be installed, and where the operator lies in it.
    call: the operator, N sources (tokens, D), query (D,), norm weight (D,) -> the mix (tokens, D).
    dtypes: of sources it takes; None for all. most_sources, most_width, power_of_two: what it takes of N and D.
    """

    distribution: str
    module: str
    operator: str
    call: Callable[[Any, Sources, Tensor, Tensor], Tensor]
    dtypes: tuple[torch.dtype, ...] | None = None
    most_sources: int | None = None
    most_width: int | None = None
    power_of_two: bool = False


def _flash_attn_res(operator: Any, sources: Sources, query: Tensor, norm_weight: Tensor) -> Tensor:
    mixes, _ = operator(torch.stack(tuple(sources)).unsqueeze(1), (query * norm_weight).unsqueeze(0), EPS)
    return mixes[0, 0]


def _fast_attnres(operator: Any, sources: Sources, query: Tensor, norm_weight: Tensor) -> Tensor:
    return operator(tuple(sources), (query * norm_weight).to(sources[0].dtype), eps=EPS)


def _flash_linear_attention(operator: Any, sources: Sources, query: Tensor, norm_weight: Tensor) -> Tensor:
    return operator(query, tuple(sources), norm_weight, rms_eps=EPS)


def _liger_kernel(operator: Any, sources: Sources, query: Tensor, norm_weight: Tensor) -> Tensor:
    return operator(torch.stack(tuple(sources)), query, norm_weight, EPS)


PEERS = {
    "flash-attn-res": Peer(
        "flash-attn-res",
        "flash_attn_res",
        "phase_1_batched_attention_triton_op",
        _flash_attn_res,
        dtypes=(torch.bfloat16,),
        power_of_two=True,
    ),
    "fast-attnres": Peer(
        "fast-attnres",
        "attnres",
        "attnres",
        _fast_attnres,
        dtypes=(torch.bfloat16,),
        most_sources=129,
        most_width=8192,
    ),
    # The operator lies in its second package, which the first one depends on.
    "flash-linear-attention": Peer("fla-core", "fla.ops.attnres", "fused_attnres", _flash_linear_attention),
    "liger-kernel": Peer("liger-kernel", "liger_kernel.transformers.functional", "liger_attn_res", _liger_kernel),
}


def version(name: str) -> str | None:
    """The installed version of a peer; None where there is none."""
    try:
        return importlib.metadata.version(PEERS[name].distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing(name: str) -> str | None:
    """That a peer is not installed, and how to install it; None where it is."""
    return None if version(name) else f"not installed: pip install {name}"


def obstacle(name: str, shape: Shape, dtype: torch.dtype) -> str | None:
    """Why a peer cannot run a shape with H = 1; None where nothing is known to hinder it."""
    peer = PEERS[name]
    if peer.dtypes and dtype not in peer.dtypes:
        return f"takes {' or '.join(map(str, peer.dtypes))} alone".replace("torch.", "")
    if peer.most_sources and shape.sites > peer.most_sources:
        return f"takes {peer.most_sources} sources at most, and the shape has {shape.sites}"
    if peer.most_width and shape.width > peer.most_width:
        return f"takes a width of {peer.most_width} at most, and the shape has {shape.width}"
    if peer.power_of_two and shape.width & (shape.width - 1):
        return f"takes a power of two as width, and the shape has {shape.width}"
    return None


def read(name: str) -> Callable[[Sources, Site, int], Tensor]:
    """A peer's read as `chains.with_reads` calls it. Imports the package."""
    peer = PEERS[name]
    operator = getattr(importlib.import_module(peer.module), peer.operator)
    return lambda sources, site, heads: peer.call(operator, sources, site.query, site.norm_weight)
