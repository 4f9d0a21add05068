"""Reads over depth: the operator `depth_mix`, and the choice of the code that runs it.

reference.py defines the result, register.py and kernels/ compute it in Triton.
"""

import math
import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Literal, overload

import torch
from torch import Tensor

from depthroute.errors import nearest
from depthroute.ops import reference
from depthroute.ops.register import fused_read

BACKENDS = ("auto", "reference", "triton")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_TRITON_INSTALLED = find_spec("triton") is not None


@overload
def depth_mix(
    sources: Sequence[Tensor] | Tensor,
    query: Tensor,
    *,
    num_heads: int = ...,
    norm_weight: Tensor | None = ...,
    eps: float = ...,
    scale: float = ...,
    return_weights: Literal[False] = ...,
    backend: str = ...,
) -> Tensor: ...


@overload
def depth_mix(
    sources: Sequence[Tensor] | Tensor,
    query: Tensor,
    *,
    num_heads: int = ...,
    norm_weight: Tensor | None = ...,
    eps: float = ...,
    scale: float = ...,
    return_weights: Literal[True],
    backend: str = ...,
) -> tuple[Tensor, Tensor]: ...


def depth_mix(
    sources: Sequence[Tensor] | Tensor,
    query: Tensor,
    *,
    num_heads: int = 1,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    scale: float = 1.0,
    return_weights: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Mix of N sources by a softmax over depth, with weights of its own for each token and each of H route heads.

    With K = D / H, head h of a token reads slice h of its sources s_0 .. s_{N-1}:

        logit_n = scale * <query_h * norm_weight_h, s_{n,h}> / sqrt(mean(s_n^2) + eps)      mean over the full width D
        mix_h   = sum over n of softmax(logit)_n * s_{n,h}

    All arithmetic is in fp32 (fp64 for fp64 sources) and only the mix is rounded, whatever autocast says.

    Args:
        sources: N >= 1 tensors (..., D) of one shape, dtype and device, of any strides; or one tensor (N, ..., D).
        query: (D,), read as (H, D / H). Its dtype may differ from that of the sources, and so may `norm_weight`'s.
        num_heads: H, divides D. One is attention residuals.
        norm_weight: (D,), the weight of the RMS norm of the keys; None for ones.
        eps: of that norm.
        scale: factor on the logits.
        return_weights: also return the softmax's weights (N, ..., H) in the accumulation type; differentiable.
        backend: "reference" is plain PyTorch. "triton" is the fused kernel, which raises where it cannot run: it
            needs Triton, sources of 16 or 32 bits on a GPU (or TRITON_INTERPRET=1), and has no weights to return.
            "auto" is Triton for sources on a GPU where that can run, the reference elsewhere.

    Returns:
        The mix (..., D) in the dtype of the sources, never a source itself; with `return_weights` also the weights.

    Raises:
        ValueError: a shape, device, number or name that does not fit. TypeError: a wrong type or dtype.
        RuntimeError: `backend="triton"` where it cannot run.

    Source: arXiv 2607.27230 (multi-head attention residuals); with one head arXiv 2603.15031.
    """
    sources = _checked_sources(sources)
    _check_vector("query", query, sources[0])
    if norm_weight is not None:
        _check_vector("norm_weight", norm_weight, sources[0])
    _check_numbers(num_heads, eps, scale, width=query.numel())
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}{nearest(str(backend), BACKENDS)}")

    obstacle = _triton_obstacle(sources[0], return_weights)
    if backend == "triton" and obstacle:
        raise RuntimeError(f"backend 'triton' cannot run here: {obstacle}")
    if backend == "triton" or (backend == "auto" and sources[0].is_cuda and not obstacle):
        weight = reference.read_weight(query, norm_weight, scale, torch.float32)
        return fused_read(sources, weight, num_heads, float(eps))  # an int would be another kernel
    return reference.depth_mix(
        sources,
        query,
        num_heads=num_heads,
        norm_weight=norm_weight,
        eps=eps,
        scale=scale,
        return_weights=return_weights,
    )


def _triton_obstacle(source: Tensor, return_weights: bool) -> str | None:
    """Why the fused kernel cannot do a read of such sources; None where it can."""
    if not _TRITON_INSTALLED:
        return "Triton is not installed"
    if return_weights:
        return "return_weights=True needs the reference"
    if source.dtype == torch.float64:
        return "it computes in float32 and the sources are float64"
    if not source.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return (
            f"the sources are on {source.device} (TRITON_INTERPRET=1 in the environment interprets kernels on the CPU)"
        )
    return None


def _checked_sources(sources: Sequence[Tensor] | Tensor) -> tuple[Tensor, ...]:
    if isinstance(sources, Tensor):
        if sources.ndim < 2:
            raise ValueError(f"stacked sources must have shape (N, ..., D), got {tuple(sources.shape)}")
        sources = sources.unbind(0)
    elif not isinstance(sources, (list, tuple)):
        raise TypeError(f"sources must be a list or tuple of tensors or one tensor, got {type(sources).__name__}")
    if not sources:
        raise ValueError("sources must hold at least one tensor, got none")
    for n, source in enumerate(sources):
        if not isinstance(source, Tensor):
            raise TypeError(f"sources[{n}] must be a tensor, got {type(source).__name__}")
        if source.dtype not in _DTYPES:
            raise TypeError(f"sources[{n}] must be float32, bfloat16, float16 or float64, got {source.dtype}")
        if source.dtype != sources[0].dtype:
            raise TypeError(f"sources[{n}] must be {sources[0].dtype} like sources[0], got {source.dtype}")
        if source.shape != sources[0].shape:
            raise ValueError(
                f"sources[{n}] must have shape {tuple(sources[0].shape)} like sources[0], got {tuple(source.shape)}"
            )
        if source.device != sources[0].device:
            raise ValueError(f"sources[{n}] must be on {sources[0].device} like sources[0], got {source.device}")
    if sources[0].ndim == 0 or sources[0].shape[-1] == 0:
        raise ValueError(f"sources must have shape (..., D) with D >= 1, got {tuple(sources[0].shape)}")
    return tuple(sources)


def _check_vector(name: str, vector: Tensor, source: Tensor) -> None:
    if not isinstance(vector, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(vector).__name__}")
    if not vector.is_floating_point():
        raise TypeError(f"{name} must be of a floating-point type, got {vector.dtype}")
    if vector.shape != source.shape[-1:]:
        raise ValueError(f"{name} must have shape ({source.shape[-1]},), the sources' width, got {tuple(vector.shape)}")
    if vector.device != source.device:
        raise ValueError(f"{name} must be on {source.device} like the sources, got {vector.device}")


def _check_numbers(num_heads: int, eps: float, scale: float, width: int) -> None:
    if not isinstance(num_heads, int) or isinstance(num_heads, bool):
        raise TypeError(f"num_heads must be an int, got {type(num_heads).__name__}")
    if num_heads < 1 or width % num_heads:
        raise ValueError(f"num_heads must be at least 1 and divide the width {width}, got {num_heads}")
    for name, value in (("eps", eps), ("scale", scale)):
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise TypeError(f"{name} must be a number, got {type(value).__name__}")
        if not abs(value) < math.inf:
            raise ValueError(f"{name} must be finite, got {value}")
    if eps < 0:
        raise ValueError(f"eps must not be negative, got {eps}")
