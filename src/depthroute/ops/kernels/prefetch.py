"""Rows that a program needs later, on their way to the L2 cache meanwhile: no registers, and nobody waits."""

import triton
import triton.language as tl

LINE = tl.constexpr(128)  # bytes of a line of the cache


@triton.jit
def lines_of(count, asked, size: tl.constexpr, most: tl.constexpr):
    """Which lines `fetch` brings of `count` values of `size` bytes, of which there are `most` at the most: [lines].

    A thread has a line. Layouts repeat a tensor that is smaller than the program, and only the first copy counts.
    """
    LINES: tl.constexpr = triton.next_power_of_2(triton.cdiv(most * size, LINE))
    line = tl.arange(0, LINES)
    thread = tl.inline_asm_elementwise("mov.u32 $0, %tid.x;", "=r", [], dtype=tl.int32, is_pure=True, pack=1)
    return (asked & (line * (LINE // size) < count) & (thread < LINES)).to(tl.int32)


@triton.jit
def fetch(pointer, first, lines):
    """Bring those lines of what lies from `first` on."""
    at = first + tl.arange(0, lines.shape[0]) * (LINE // (pointer.dtype.element_ty.primitive_bitwidth // 8))
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
        "=r,l,r",
        [(pointer + at).to(tl.int64), lines],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
