"""What every launch needs: plain tensors, the right device, a compiled variant, a list of tensors as one table."""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ALIGNMENT = 16  # bytes: one vector load
SPANS = (16, 64, 256)  # addresses in one launch; every list is padded to these, so only three variants are compiled
WRITTEN = 16  # of them by one program, so that no thread stores hundreds
ROUNDED = 1024  # values that one program rounds

_variants: dict[tuple[Any, ...], Any] = {}


@triton.jit
def _write(table, addresses, EACH: tl.constexpr):
    program = tl.program_id(0)
    for i in tl.static_range(len(addresses)):
        tl.store(table + i, addresses[i], mask=i // EACH == program)


@triton.jit(do_not_specialize=["size"])
def _write_and_round(table, addresses, values, out, size, EACH: tl.constexpr, BLOCK: tl.constexpr):
    _write(table, addresses, EACH)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rounded = tl.load(values + at, mask=at < size, other=0.0).to(out.dtype.element_ty)
    tl.store(out + at, rounded, mask=at < size)


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


def pointer_table(tensors: Sequence[Tensor], rounded: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Addresses of plain tensors as an int64 tensor on their device. The caller keeps the tensors alive.

    rounded: two plain tensors of one shape; the same kernel rounds the first into the second.

    They travel as kernel arguments: a copy from the host would wait for the device, and a CUDA graph would replay it
    from memory that has long been something else. Of empty tensors, which have no address, the table is not filled.
    """
    addresses = [tensor.data_ptr() for tensor in tensors]
    spans = [SPANS[-1]] * (len(addresses) // SPANS[-1])
    if rest := len(addresses) % SPANS[-1]:
        spans.append(next(span for span in SPANS if rest <= span))
    addresses += addresses[-1:] * (sum(spans) - len(addresses))
    table = torch.empty(len(addresses), dtype=torch.int64, device=tensors[0].device)
    start = 0
    for span in spans if tensors[0].numel() else ():
        written = tuple(addresses[start : start + span])
        if rounded is None or start:
            launch(_write, span // WRITTEN, (table[start:], written), (WRITTEN,), num_warps=1)
        else:
            programs = max(span // WRITTEN, cdiv(rounded[0].numel(), ROUNDED))
            arguments = (table, written, *rounded, rounded[0].numel())
            launch(_write_and_round, programs, arguments, (WRITTEN, ROUNDED), num_warps=4)
        start += span
    return table


def contiguous_like(tensor: Tensor) -> Tensor:
    """Memory for a tensor of the same shape and type. `new_empty` takes the host more than twice as long."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def cdiv(dividend: int, divisor: int) -> int:
    """The quotient, rounded up. `triton.cdiv` takes numbers of kernels too, and takes the host longer."""
    return -(-dividend // divisor)


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager:
    """Launches inside go to the tensor's device, whichever is the current one."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


def launch(kernel: Any, programs: int, arguments: Sequence[Any], constants: Sequence[Any], **options: int) -> None:
    """`kernel[(programs,)](*arguments, *constants, **options)` without looking at every argument again.

    Triton chooses the compiled variant by the type, the alignment and the value of each argument, which for tens of
    addresses takes longer than the kernel runs. Here it depends on less, which is what callers must keep to: tensors
    and addresses (tuples of int) are plain, every other argument is one that the kernel does not specialise on.
    """
    if not programs:
        return
    values: list[Any] = []
    kinds: list[Any] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            kinds.append(argument.dtype)
            values.append(argument.data_ptr())
        else:
            kinds.append(len(argument) if isinstance(argument, tuple) else type(argument))
            values.append(argument)
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    key = (id(kernel), device, *options.values(), *constants, *kinds)
    variant = _variants.get(key)
    if variant is not None:
        variant[programs, 1, 1](*values, *constants)
        return
    variant = kernel[(programs,)](*arguments, *constants, **options)
    if variant is not None:  # the interpreter has none
        _variants[key] = variant
