"""What every launch needs: plain tensors, the right device, and a list of tensors as one table of pointers."""

import contextlib
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

ALIGNMENT = 16  # bytes: one vector load
FEW, MANY = 16, 64  # addresses in one launch; every list is padded to these, so only two variants are ever compiled


@triton.jit
def _write(table, addresses):
    for i in tl.static_range(len(addresses)):
        tl.store(table + i, addresses[i])


@triton.jit
def address(table, n, size):
    """Entry n of a table of `size` addresses; null from `size` on, where every access must be masked."""
    return tl.load(table + n, mask=n < size, other=0)


@triton.jit
def pointer(address, dtype: tl.constexpr):
    """An address as a pointer that is known to be aligned for vector loads: plain() has seen to it."""
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


def plain(tensor: Tensor) -> Tensor:
    """The tensor itself if it is contiguous and aligned for vector loads, otherwise a copy that is."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def pointer_table(tensors: Sequence[Tensor]) -> Tensor:
    """Addresses of plain tensors as an int64 tensor on their device. The caller keeps the tensors alive.

    They travel as kernel arguments: a copy from the host would wait for the device, and a CUDA graph would replay it
    from memory that has long been something else.
    """
    addresses = [tensor.data_ptr() for tensor in tensors]
    spans = [MANY] * (len(addresses) // MANY)
    if rest := len(addresses) % MANY:
        spans.append(FEW if rest <= FEW else MANY)
    addresses += addresses[-1:] * (sum(spans) - len(addresses))
    table = torch.empty(len(addresses), dtype=torch.int64, device=tensors[0].device)
    start = 0
    for span in spans:
        _write[(1,)](table[start:], tuple(addresses[start : start + span]), num_warps=1)
        start += span
    return table


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager:
    """Launches inside go to the tensor's device, whichever is the current one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
