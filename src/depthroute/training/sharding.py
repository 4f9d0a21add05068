"""Parameters that FSDP2 has sharded, seen as a whole. On other models these functions change nothing."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor


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
