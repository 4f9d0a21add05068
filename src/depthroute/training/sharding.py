"""Parameters that FSDP2 has sharded, seen as a whole. On other models these functions change nothing."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor


def leave_precision_to_autocast(plugin: Any) -> None:
    """Let Accelerate's FSDP2 plugin gather fp32 weights, so that many devices compute what one would.

    Its own choice under bf16 rounds the streams and even the loss. Raises ValueError for FSDP1.
    """
    if plugin.fsdp_version != 2:
        raise ValueError(f"fsdp_version is {plugin.fsdp_version}, but should be 2 (accelerate launch --fsdp_version 2)")
    plugin.mixed_precision_policy = MixedPrecisionPolicy()


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
