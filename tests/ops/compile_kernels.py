"""Compiles every variant of the two phases' kernels for an H200, on a machine without one; a script, not a test.

The interpreter takes programs that the compiler refuses (a name of two types in a loop), so this runs without it.
"""

from __future__ import annotations

import itertools
from typing import Any

import triton.language as tl
from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from depthroute.ops.kernels import gated, inter, merge
from depthroute.ops.kernels import sums as sum_kernels
from depthroute.ops.kernels.settings import (
    MAX_HEAD,
    gated_budget,
    inter_budget,
    inter_shared,
    inter_tile,
    merge_budget,
    merge_tile,
)

SHARED = 232448  # bytes of shared memory that a program of an H200 may have
INTS = {"N", "S", "M", "T", "steps", "has_partial", "has_rstd_grad", "has_sums", "has_rstd_sums", "has", "P", "B", "D"}
ROWS = {"grad", "partial", "out", "gamma", "partial_grad", "stream", "null"}
SUMS = tuple(itertools.product((False, True), repeat=2))  # so far of rows, of rstd; under torch.compile not of rows
LISTS = {"sources", "rstds", "sums", "rstd_sums", "source_grads", "rstd_grads", "merge_parts"}


def compile_one(kernel: Any, constants: dict[str, Any], shared: int = SHARED, **options: int) -> Any:
    signature: dict[str, Any] = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in LISTS:
            signature[name] = ("i64",) * 4
        elif name in INTS:
            signature[name] = "i32"
        elif name in ("eps", "norm_eps"):
            signature[name] = "fp32"
        else:
            signature[name] = "*i64" if name == "table" else "*bf16" if name in ROWS else "*fp32"
    where = {(i,): constants[name] for i, name in enumerate(kernel.arg_names) if name in constants}
    compiled = compile_kernel(ASTSource(kernel, signature, where), target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.metadata.shared <= shared, (kernel.fn.__name__, constants, compiled.metadata.shared, shared)
    return compiled


def merges(heads: int, width: int) -> None:
    names = ("H", "K", "BT", "BH", "W", "P")
    forward = merge_tile(heads, width // heads, 2, "forward")
    backward = merge_tile(heads, width // heads, 2, "backward")
    of_forward = dict(zip(names, forward.block(heads, width), strict=True))
    of_backward = dict(zip(names, backward.block(heads, width), strict=True))
    more = {"num_warps": backward.warps, "maxnreg": merge_budget(backward, 2, 4)[0]}
    compile_one(gated.gated_forward_kernel, of_forward, num_warps=forward.warps)
    registers = gated_budget(backward)[0]
    of_gated = {**of_backward, "OWN": -(-(heads + 1) // 4) * 4}
    compile_one(gated.gated_backward_kernel, of_gated, num_warps=backward.warps, maxnreg=registers)
    for norm in (False, True):
        compile_one(merge.merge_forward_kernel, {**of_forward, "NORM": norm}, num_warps=forward.warps)
        for sums, rstd_sums in SUMS:
            flags = {"NORM": norm, "SUMS": sums, "RSTD_SUMS": rstd_sums}
            compile_one(merge.merge_backward_kernel, {**of_backward, **flags}, **more)


def inters(heads: int, width: int, sites: int = 3, dtype: tl.dtype = tl.bfloat16) -> None:
    itemsize = dtype.primitive_bitwidth // 8

    def constants_of(phase: str) -> tuple[dict[str, Any], dict[str, int]]:
        tile = inter_tile(sites, width // heads, itemsize, phase)
        names = ("H", "K", "BN", "BS", "C", "W", "P")
        options = {"num_warps": tile.warps, "maxnreg": inter_budget(tile, heads, itemsize, phase)[0]}
        # Some variants take a little more, and heads that are not aligned.
        options["shared"] = inter_shared(tile, itemsize, phase) * (9 if width // heads % 8 == 0 else 10) // 8
        return {**dict(zip(names, tile.block(heads, width), strict=True)), "dtype": dtype}, options

    constants, options = constants_of("forward")
    check_operands(compile_one(inter.inter_forward_kernel, constants, **options), constants)
    constants, options = constants_of("backward")
    for (exact, one), (sums, rstd_sums) in itertools.product(((False, False), (True, False), (True, True)), SUMS):
        flags = {"EXACT": exact, "ONE": one, "SUMS": sums, "RSTD_SUMS": rstd_sums}
        if sites == 3 or (exact and sums):  # the most that there can be
            check_operands(compile_one(inter.inter_backward_kernel, {**constants, **flags}, **options), constants)


def check_operands(compiled: Any, constants: dict[str, Any]) -> None:
    """Rows are operands of the products as they are loaded: no shuffles but those of sums over a few rows or sites."""
    if constants["K"] % 64 == 0 and constants["C"] == 1 and constants["BS"] == 8:
        assert compiled.asm["ptx"].count("shfl.sync") <= 24, (compiled.metadata.name, constants)


if __name__ == "__main__":
    compile_one(
        sum_kernels.sum_weights_kernel,
        {"BP": sum_kernels.TILE_AT_ONCE, "BD": sum_kernels.TILE_COLUMNS, "OF_MERGE": 2, "OF_INTER": 1},
        num_warps=sum_kernels.WARPS,
    )
    for shape in ((2, 128), (2, 160)):  # heads of one part, and of several
        merges(*shape)
        inters(*shape)
    inters(1, 100)  # padded
    inters(2, 448, sites=9)
    inters(1, MAX_HEAD[2] // 2, sites=16)  # the widest heads, and the most sites
    inters(1, MAX_HEAD[4] // 4, sites=16, dtype=tl.float32)
    print("compiled")
