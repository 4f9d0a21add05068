"""A model on several devices: sharded by FSDP2, compiled layer by layer, and its parameters seen as a whole."""

from __future__ import annotations

from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def leave_precision_to_autocast(plugin: Any) -> None:
    """Let Accelerate's FSDP2 plugin gather fp32 weights, so that many devices compute what one would.

    Its own choice under bf16 rounds the streams and even the loss. Raises ValueError for FSDP1.
    """
    if plugin.fsdp_version != 2:
        raise ValueError(f"fsdp_version is {plugin.fsdp_version}, but should be 2 (accelerate launch --fsdp_version 2)")
    plugin.mixed_precision_policy = MixedPrecisionPolicy()


def shard(
    model: Any, mesh: DeviceMesh | None = None, *, policy: MixedPrecisionPolicy | None = None, reshard: bool = True
) -> None:
    """Shard a causal model by FSDP2, in place: each decoder layer, the embedding, the head, and all the rest.

    `mesh` has one dimension (full shard; all ranks by default) or two (replicas of shards: hybrid shard). `reshard`
    lets a layer go after its forward and gathers it again for its backward. The model may be on the meta device:
    `initialize` then gives it weights. The parameters of the residual scheme are tiny and used in every layer, so
    they belong to the outermost group, which is gathered from the start of a forward to its end.
    """
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy or MixedPrecisionPolicy()}
    for layer in model.model.layers:
        fully_shard(layer, **options, reshard_after_forward=reshard)
    if model.lm_head.weight is not model.model.embed_tokens.weight:
        fully_shard(model.model.embed_tokens, **options, reshard_after_forward=reshard)
        fully_shard(model.lm_head, **options, reshard_after_forward=False)
    fully_shard(model, **options)


@torch.no_grad()
def initialize(model: Any, device: torch.device | str) -> None:
    """Give weights on `device` to a model that was made (and sharded) on the meta device; each rank makes its own part.

    The weights have the distribution of a fresh model, and not the values that a seed gives on one device.
    """
    model.to_empty(device=device)
    model.tie_weights()
    for module in model.modules():
        model._init_weights(module)


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


def whole(tensor: Tensor) -> Tensor:
    """A tensor with all its shards, on every rank; all ranks take part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placed_like(tensor: Tensor, other: Tensor) -> Tensor:
    """A whole tensor on the device of `other`, sharded as that is; all ranks take part."""
    tensor = tensor.to(other.device)
    if not isinstance(other, DTensor):
        return tensor
    return distribute_tensor(tensor, other.device_mesh, other.placements)


def reshard(model: nn.Module) -> None:
    """Let a model have its shards as parameters again, and gather them anew for its next forward.

    After a forward in evaluation mode FSDP2 keeps what it has gathered, and would not see another value of a shard.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
