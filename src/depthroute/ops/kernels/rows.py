"""Whole rows in the registers of a program: blocks [tokens, heads, channels of a head].

A head's K channels are cut into BA + BB, powers of two, rather than padded to one (160 = 128 + 32; BB = 0 where one is
enough). So a row is a pair of blocks; with BB = 0 the second stands for nothing and repeats the first.
"""

import os

import triton
import triton.language as tl

_COMPILED = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")


@triton.jit
def opaque(step):
    """The step of a loop over tokens, as a value that the compiler knows nothing about.

    From a plain counter it would keep a running address for every tensor of the loop: twice the registers, and spills.
    """
    if _COMPILED:
        step = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [step], dtype=tl.int32, is_pure=False, pack=1)
    return step


@triton.jit
def column(token, H: tl.constexpr, K: tl.constexpr, BH: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr):
    """Offsets of the rows of some tokens."""
    start = token[:, None, None] * (H * K) + tl.arange(0, BH)[None, :, None] * K
    a = start + tl.arange(0, BA)[None, None, :]
    b = a
    if BB > 0:
        b = start + (BA + tl.arange(0, BB))[None, None, :]
    return a, b


@triton.jit
def mask_of(live, H: tl.constexpr, K: tl.constexpr, BH: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr):
    """Which of those offsets exist, for tokens that are live."""
    rows = live[:, None, None] & (tl.arange(0, BH) < H)[None, :, None]
    a = rows & (tl.arange(0, BA) < K)[None, None, :]
    b = a
    if BB > 0:
        b = rows & (BA + tl.arange(0, BB) < K)[None, None, :]
    return a, b


@triton.jit
def load(pointer, at, inside, BB: tl.constexpr):
    a = tl.load(pointer + at[0], mask=inside[0], other=0.0)
    b = a
    if BB > 0:
        b = tl.load(pointer + at[1], mask=inside[1], other=0.0)
    return a, b


@triton.jit
def store(pointer, at, row, inside, BB: tl.constexpr):
    tl.store(pointer + at[0], row[0], mask=inside[0])
    if BB > 0:
        tl.store(pointer + at[1], row[1], mask=inside[1])


@triton.jit
def dot(x, y, BB: tl.constexpr):
    """Inner product for each head, [tokens, heads]."""
    total = tl.sum(x[0].to(tl.float32) * y[0].to(tl.float32), 2)
    if BB > 0:
        total += tl.sum(x[1].to(tl.float32) * y[1].to(tl.float32), 2)
    return total


@triton.jit
def square(x, BB: tl.constexpr):
    """Sum of squares over the full width, [tokens]."""
    return tl.sum(dot(x, x, BB), 1)
