"""A model in shards (FSDP2): how it is cut, how it gets its weights, and its parameters seen as a whole."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from depthroute.models import DepthRoutedForCausalLM
from depthroute.training.compilation import works_by_sublayer

# A unit takes the host as long, whatever its size, and small layers do not take the device long enough to hide that. So
# they share one: up to so many parameters, and in so many units that gathering and computing still go on side by side.
UNIT_PARAMETERS, LEAST_UNITS = 2**27, 8


def mesh_of(sharding: str, device: str) -> DeviceMesh:
    """The mesh of all ranks: (ranks,) for "full" shard, (hosts, ranks of a host) for "hybrid".

    Under "hybrid" each host has a whole copy, in shards, and only gradients travel between hosts.
    Raises ValueError where the hosts do not have the same number of ranks, as torchrun's LOCAL_WORLD_SIZE counts them.
    """
    ranks = dist.get_world_size()
    if sharding == "full":
        return init_device_mesh(device, (ranks,), mesh_dim_names=("shard",))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    if ranks % local:
        raise ValueError(f"training.sharding is 'hybrid', but {ranks} processes are not {local} on every host")
    return init_device_mesh(device, (ranks // local, local), mesh_dim_names=("copy", "shard"))


def shard(
    model: Any, mesh: DeviceMesh | None = None, *, gather: torch.dtype = torch.float32, reshard: bool = True
) -> None:
    """Shard a causal model by FSDP2, in place: decoder layers, embedding and head where they differ, and the rest.

    A unit is a layer or a few small ones. Where `works_by_sublayer` says so, it is attention and MLP of its layers, and
    their norms belong to the rest: FSDP2 puts a hook on every tensor that comes out of a unit, and passes what goes in
    through a function, which for each source at each layer takes the host longer than the layer.

    `mesh` has one dimension (all ranks by default) or two (copies of shards). The layers' weights are gathered in the
    dtype `gather`: in bf16 half as much travels, and the matrices are what autocast makes of them anyway. Embedding,
    head, last norm, the residual scheme and what else belongs to the rest stay in fp32: the streams take their dtype
    from the embedding. Gradients are reduced in fp32. `reshard` frees a unit after its forward and gathers it again
    for its backward. The parameters of the scheme are tiny and every layer uses them, so they belong to the outermost
    group, which is whole from the start of a forward to the end of the backward.
    """
    # A state passes through the layers, and nothing changes it in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard}
    policy = MixedPrecisionPolicy()
    if gather != torch.float32:
        policy = MixedPrecisionPolicy(param_dtype=gather, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for unit in units(model):
        fully_shard(unit, **options, mp_policy=policy)
    if model.lm_head.weight is not model.model.embed_tokens.weight:
        fully_shard(model.model.embed_tokens, **options)
        fully_shard(model.lm_head, **{**options, "reshard_after_forward": False})
    fully_shard(model, mesh=mesh)


def units(model: Any) -> list[list[nn.Module]]:
    """The modules of each unit of decoder layers, in the order in which they run."""
    layers = list(model.model.layers)
    size = sum(parameter.numel() for parameter in layers[0].parameters())
    joined = max(1, min(UNIT_PARAMETERS // size, len(layers) // LEAST_UNITS))
    groups = [layers[i : i + joined] for i in range(0, len(layers), joined)]
    if works_by_sublayer(model):
        return [[part for layer in group for part in (layer.self_attn, layer.mlp)] for group in groups]
    return groups


def shard_from_first(model: Any, device: torch.device, mesh: DeviceMesh | None = None, **options: Any) -> None:
    """`shard`, with the weights that the first rank's model has; those of the others may be on the meta device.

    No device ever holds more than its shards and one whole tensor. `options` are those of `shard`.
    """
    weights = model.state_dict() if dist.get_rank() == 0 else {}
    model.to("meta")
    model.tie_weights()
    shard(model, mesh, **options)
    _allocate(model, device)
    whole_from_first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights, options=whole_from_first)


def on_first_rank(build: Callable[[], DepthRoutedForCausalLM]) -> DepthRoutedForCausalLM:
    """What `build` makes, on the first rank alone; the others get its like on the meta device, without weights."""
    model = build() if dist.get_rank() == 0 else None
    configuration: list[Any] = [None if model is None else model.config]
    dist.broadcast_object_list(configuration)
    if model is not None:
        return model
    with torch.device("meta"):
        return DepthRoutedForCausalLM(configuration[0])


def _allocate(model: Any, device: torch.device | str) -> None:
    """Memory on `device` for a model on the meta device, and the buffers that no checkpoint has."""
    model.to_empty(device=device)
    model.tie_weights()
    for module in model.modules():
        if module._non_persistent_buffers_set:
            model._init_weights(module)


@torch.no_grad()
def initialize(model: Any, device: torch.device | str) -> None:
    """Give weights on `device` to a model that was made (and sharded) on the meta device; each rank makes its own part.

    The weights have the distribution of a fresh model, and not the values that a seed gives on one device.
    """
    _allocate(model, device)
    for module in model.modules():
        model._init_weights(module)


def whole(tensor: Tensor) -> Tensor:
    """A tensor with all its shards, on every rank; all ranks take part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placed_like(tensor: Tensor, other: Tensor) -> Tensor:
    """A whole tensor on the device of `other`, sharded as that is; all ranks take part."""
    tensor = tensor.to(other.device)
    if not isinstance(other, DTensor):
        return tensor
    return distribute_tensor(tensor, other.device_mesh, other.placements)


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """As the function of torch.nn.utils, on shards as they are; the norm is that of all gradients, on every rank.

    There DTensor is asked for each gradient, twice, which takes the host longer than the device. All ranks take part.
    The sharded gradients have one mesh; those that are whole are the same on every rank. A `max_norm` of infinity
    leaves the gradients alone.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    sharded = [grad for grad in grads if isinstance(grad, DTensor)]
    shards, rest = [grad.to_local() for grad in sharded], [grad for grad in grads if not isinstance(grad, DTensor)]
    square = torch.nn.utils.get_total_norm(shards).square()
    for dim, placement in enumerate(sharded[0].placements if sharded else ()):
        if placement.is_shard():
            dist.all_reduce(square, group=sharded[0].device_mesh.get_group(dim))
    norm = (square + torch.nn.utils.get_total_norm(rest).square()).sqrt() if rest else square.sqrt()
    if grads and max_norm < float("inf"):
        torch._foreach_mul_([*shards, *rest], (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def reshard(model: nn.Module) -> None:
    """Let a model have its shards as parameters again, and gather them anew for its next forward.

    After a forward in evaluation mode FSDP2 keeps what it has gathered, and would not see another value of a shard.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
