"""Whole rows in the registers of a program, and arithmetic on them in fp32.

A row is a tuple of blocks [tokens, heads, channels of a part]: a head's K channels are cut into P equal parts of W, a
power of two, rather than padded to one (160 = 5 x 32). Blocks of one shape have one layout; with blocks of two shapes
every inner product would move rows through shared memory. Factors are [tokens, heads].
"""

import os

import triton
import triton.language as tl

COMPILED = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")


@triton.jit
def opaque(step):
    """The step of a loop over tokens, as a value that the compiler knows nothing about.

    From a plain counter it would keep a running address for every tensor of the loop: twice the registers, and spills.
    """
    if COMPILED:
        step = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [step], dtype=tl.int32, is_pure=False, pack=1)
    return step


@triton.jit
def wide(x):
    """In fp32. Of a pair in bf16 one operation each, anew at each use; the compiler takes three."""
    if COMPILED and x.dtype == tl.bfloat16:
        y = tl.inline_asm_elementwise(
            "{ .reg .b32 t; shl.b32 t, $2, 16; mov.b32 $0, t; and.b32 t, $2, 0xffff0000; mov.b32 $1, t; }",
            "=f,=f,r",
            [x],
            dtype=tl.float32,
            is_pure=False,
            pack=2,
        )
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def as_loaded(row, PURE: tl.constexpr = True):
    """The same 16-bit values, as ones that the compiler knows nothing about.

    It would keep what they were widened to at their first use: twice the registers. Not PURE: it also moves none of
    what is done with them up to their loads.
    """
    out = ()  # type: tuple[tl.tensor, ...]
    for part in tl.static_range(len(row)):
        x = row[part]
        if COMPILED and x.dtype.primitive_bitwidth == 16:
            x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=PURE, pack=2)
        out = out + (x,)  # noqa: RUF005
    return out


@triton.jit
def store_factor(pointer, factor, inside):
    """Store factors from the lanes that have them, each several times with one value.

    `tl.store` would first deal them out anew through shared memory, with two barriers each time.
    """
    if COMPILED:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.b32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,f,r",
            [pointer.to(tl.int64), factor, inside.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(pointer, factor, mask=inside)


@triton.jit
def column(token, H: tl.constexpr, K: tl.constexpr, BH: tl.constexpr, W: tl.constexpr):
    """Offsets of the first part of the rows of some tokens."""
    return token[:, None, None] * (H * K) + tl.arange(0, BH)[None, :, None] * K + tl.arange(0, W)[None, None, :]


@triton.jit
def mask_of(live, H: tl.constexpr, K: tl.constexpr, BH: tl.constexpr, W: tl.constexpr):
    """Which of those offsets exist, for tokens that are live; the same of every part."""
    return live[:, None, None] & (tl.arange(0, BH) < H)[None, :, None] & (tl.arange(0, W) < K)[None, None, :]


@triton.jit
def load(pointer, at, inside, P: tl.constexpr):
    row = ()  # type: tuple[tl.tensor, ...]
    for part in tl.static_range(P):
        row = row + (tl.load(pointer + at + part * at.shape[2], mask=inside, other=0.0),)  # noqa: RUF005
    return row


@triton.jit
def store(pointer, at, row, inside):
    """Rounds to the type of the pointer."""
    for part in tl.static_range(len(row)):
        tl.store(pointer + at + part * at.shape[2], row[part].to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def zeros(BT: tl.constexpr, BH: tl.constexpr, W: tl.constexpr, P: tl.constexpr):
    """P blocks [BT, BH, W]."""
    row = ()  # type: tuple[tl.tensor, ...]
    for _ in tl.static_range(P):
        row = row + (tl.zeros((BT, BH, W), tl.float32),)  # noqa: RUF005
    return row


@triton.jit
def round_to(row, dtype: tl.constexpr):
    out = ()  # type: tuple[tl.tensor, ...]
    for part in tl.static_range(len(row)):
        out = out + (row[part].to(dtype).to(tl.float32),)  # noqa: RUF005
    return out


@triton.jit
def add(x, y):
    out = ()  # type: tuple[tl.tensor, ...]
    for part in tl.static_range(len(x)):
        out = out + (wide(x[part]) + wide(y[part]),)  # noqa: RUF005
    return out


@triton.jit
def subtract(x, y):
    out = ()  # type: tuple[tl.tensor, ...]
    for part in tl.static_range(len(x)):
        out = out + (wide(x[part]) - wide(y[part]),)  # noqa: RUF005
    return out


@triton.jit
def multiply(x, y):
    out = ()  # type: tuple[tl.tensor, ...]
    for part in tl.static_range(len(x)):
        out = out + (wide(x[part]) * wide(y[part]),)  # noqa: RUF005
    return out


@triton.jit
def scale(factor, row):
    out = ()  # type: tuple[tl.tensor, ...]
    for part in tl.static_range(len(row)):
        out = out + (factor[:, :, None] * wide(row[part]),)  # noqa: RUF005
    return out


@triton.jit
def add_scaled(total, factor, row):
    """total + factor * row."""
    out = ()  # type: tuple[tl.tensor, ...]
    for part in tl.static_range(len(row)):
        out = out + (total[part] + factor[:, :, None] * wide(row[part]),)  # noqa: RUF005
    return out


@triton.jit
def dot(x, y):
    """Inner product for each head, [tokens, heads]."""
    products = wide(x[0]) * wide(y[0])
    for part in tl.static_range(1, len(x)):
        products += wide(x[part]) * wide(y[part])
    return tl.sum(products, 2)


@triton.jit
def square(x):
    """Sum of squares over the full width, [tokens]."""
    return tl.sum(dot(x, x), 1)


@triton.jit
def sum_tokens(row):
    """Sum over the tokens of a block, [1, heads, channels]."""
    out = ()  # type: tuple[tl.tensor, ...]
    for part in tl.static_range(len(row)):
        out = out + (tl.sum(row[part], 0)[None, :, :],)  # noqa: RUF005
    return out
