"""Compiling a model layer by layer, as training on several devices needs it."""

from __future__ import annotations

from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch


def compile_layers(model: Any, **options: Any) -> None:
    """Compile each decoder layer and the loss by itself, in place; `options` are those of `torch.compile`.

    FSDP2 gathers weights between the layers, and DDP sends gradients while earlier layers are at work, so neither can
    have one graph of the whole model. Checkpointing and the hooks of FSDP2 stay outside of the graphs.
    """
    # Splits a graph at the buckets of DDP, which a single layer does not need.
    torch._dynamo.config.optimize_ddp = False
    for index, layer in enumerate(model.model.layers):
        # Not bound to the layer itself, whose class FSDP2 changes: its graph would have to be made anew.
        parts = SimpleNamespace(index=layer.index, **dict(layer.named_children()))
        run = _with_own_code(type(layer).run_sublayers, f"run_layer_{index}")
        layer.run_sublayers = torch.compile(MethodType(run, parts), **options)
    model.loss_function = torch.compile(model.loss_function, **options)


def _with_own_code(function: Any, name: str) -> FunctionType:
    """The same function with code of its own, since Dynamo keeps at most eight graphs of one piece of code."""
    code = function.__code__.replace(co_name=name)
    copy = FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
