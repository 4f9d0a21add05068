"""Watching the reads of a model from outside: the model's forward has no flag for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from depthroute.residual import DepthRead

Record = Callable[[int, DepthRead, tuple[Tensor, ...]], object]


@contextmanager
def tap_reads(model: nn.Module, record: Record) -> Iterator[None]:
    """Calls `record(site, read, sources)` for every read that the model makes inside the `with` block.

    `read` is the module of that read (`read.weights(sources)` gives its routing weights) and `sources` the tensors
    (B, T, D) that it mixes, detached; `record` runs without gradients, so nothing that it keeps holds a graph.
    Sites that the scheme does not read are passed over. Compiled models run uncompiled inside the block, since a
    compiled graph would not call back. The scheme is as before on exit, after an error too.
    Raises TypeError for a model without a residual scheme.
    """
    residual: Any = decoder_of(model).residual
    before = {name: vars(residual)[name] for name in ("read", "finish") if name in vars(residual)}
    read, finish = residual.read, residual.finish

    def report(state: Any, site: int) -> None:
        with torch.no_grad():
            found = residual.site_read(state, site)
            if found is not None:
                module, sources = found
                record(site, module, tuple(source.detach() for source in sources))

    @wraps(read)
    def tapped_read(state: Any, site: int, *args: Any, **kwargs: Any) -> Any:
        report(state, site)
        return read(state, site, *args, **kwargs)

    @wraps(finish)
    def tapped_finish(state: Any, *args: Any, **kwargs: Any) -> Any:
        report(state, residual.num_sites - 1)
        return finish(state, *args, **kwargs)

    residual.read, residual.finish = tapped_read, tapped_finish
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        del residual.read, residual.finish
        vars(residual).update(before)


def decoder_of(model: nn.Module) -> Any:
    """The decoder of a causal language model, which holds the residual scheme; TypeError where there is none."""
    decoder = getattr(model, "model", None)
    if not hasattr(decoder, "residual"):
        raise TypeError(f"model: {type(model).__name__} has no residual scheme; wanted a DepthRoutedForCausalLM")
    return decoder
