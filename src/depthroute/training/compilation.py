"""Compiling a model for several devices: whole for DDP, in parts for FSDP2."""

from __future__ import annotations

from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch

from depthroute.residual.mhar import Mhar


def compile_whole(model: Any, **options: Any) -> None:
    """Compile what a causal model computes as one graph, in place; `options` are those of `torch.compile`.

    Under DDP its gradients then come all at once, at the end of the backward, and are sent after it instead of during
    it. That costs less than the launches of a model in parts.
    """
    whole_under_ddp()
    model.forward = torch.compile(model.forward, **options)


def whole_under_ddp() -> None:
    """Have no graph split at the buckets of DDP."""
    torch._dynamo.config.optimize_ddp = False


def works_by_sublayer(model: Any) -> bool:
    """Whether attention and MLP, and not layers, are what is compiled and gathered by itself: `mhar`, `block_mhar`.

    Their many sources then pass by every graph and every hook. (`denseformer` has many states too; a layer's graph
    mixes them.)
    """
    return isinstance(model.model.residual, Mhar)


def compile_parts(model: Any, **options: Any) -> None:
    """Compile parts of a causal model by themselves, in place; `options` are those of `torch.compile`.

    FSDP2 gathers weights between the layers, so there can be no graph of the whole model. The parts are each decoder
    layer and the loss. For `mhar` and `block_mhar` they are attention and MLP, which are the same graphs in all layers:
    the many sources then go from read to read, past every graph, instead of through all of them. (`delta_mhar` has few,
    and a norm and additions at every site, which a graph of the layer joins.) Checkpointing and the hooks of FSDP2 stay
    outside of the graphs.
    """
    by_sublayer = works_by_sublayer(model)
    for layer in model.model.layers:
        if by_sublayer:
            for part in (layer.self_attn, layer.mlp):
                part.forward = torch.compile(part.forward, **options)
        else:
            layer.run_sublayers = torch.compile(_on_its_own(layer), **options)
    model.loss_function = torch.compile(model.loss_function, **options)


def _on_its_own(layer: Any) -> MethodType:
    """What a layer runs, with code of its own and not bound to the layer.

    Dynamo keeps at most eight graphs of one piece of code, and makes a graph anew where FSDP2 has changed the class of
    the layer.
    """
    function = type(layer).run_sublayers
    code = function.__code__.replace(co_name=f"run_layer_{layer.index}")
    copy = FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return MethodType(copy, SimpleNamespace(index=layer.index, **dict(layer.named_children())))
