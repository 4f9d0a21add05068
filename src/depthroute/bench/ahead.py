"""Compiling a model before its first step; in parts, in the memory of one layer at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from depthroute.training.compilation import compile_parts, compile_whole


def compile_whole_ahead(model: Any, ids: Tensor, precision: str, **options: Any) -> None:
    """`compile_whole`, and let the compiler make the graphs of a training step on `ids` (B, T) now."""
    compile_whole(model, **options)
    _step(model, ids, precision)
    model.zero_grad(set_to_none=True)


def compile_ahead(model: Any, ids: Tensor, precision: str, **options: Any) -> None:
    """`compile_parts`, and let the compiler make every graph of a training step on `ids` (B, T) now.

    Each layer runs forward and backward by itself, so nothing is kept from layer to layer but the state. A model on
    the meta device gets a layer on the device of `ids` at a time, and is on the meta device again afterwards. Gradients
    are cleared; checkpointing must still be off.
    """
    compile_parts(model, **options)
    layers = model.model.layers
    on_meta = model.lm_head.weight.is_meta
    if on_meta:
        ends = (model.model.embed_tokens, model.model.norm, model.lm_head, model.model.residual, model.model.rotary_emb)
        for part in ends:
            part.to_empty(device=ids.device)
            for module in part.modules():
                model._init_weights(module)
        model.tie_weights()
    compiled = [layer.run_sublayers for layer in layers]
    for layer, run in zip(layers, compiled, strict=True):
        layer.run_sublayers = _alone(layer, run, ids.device if on_meta else None)
    _step(model, ids, precision)
    for layer, run in zip(layers, compiled, strict=True):
        layer.run_sublayers = run
    model.zero_grad(set_to_none=True)
    if on_meta:
        model.to("meta")
        model.tie_weights()


def _step(model: Any, ids: Tensor, precision: str) -> None:
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=precision == "bf16"):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()


def _alone(layer: Any, compiled: Any, device: torch.device | None) -> Callable[..., tuple[Tensor, ...]]:
    """What a layer runs, cut off from the graph around it, with its backward right after its forward."""

    def run(*state: Tensor, **arguments: Any) -> tuple[Tensor, ...]:
        with _placed(layer, device):
            own = tuple(_cut(part) for part in state)
            after = compiled(*own, **arguments)
            # An output that is an input has no graph of its own.
            made = [part for part in after if part.grad_fn is not None]
            torch.autograd.backward(made, [torch.ones_like(part) for part in made])
            layer.zero_grad(set_to_none=True)
            return tuple(_cut(part) for part in after)

    return run


def _cut(part: Tensor) -> Tensor:
    """The same values without the graph that made them."""
    return part.detach().requires_grad_(part.requires_grad)


@contextmanager
def _placed(layer: Any, device: torch.device | None) -> Iterator[None]:
    if device is None:
        yield
        return
    layer.to_empty(device=device)
    for parameter in layer.parameters():  # what memory holds may be anything, and slow or noisy to compute with
        torch.nn.init.normal_(parameter, std=0.02)
    try:
        yield
    finally:
        layer.to("meta")
