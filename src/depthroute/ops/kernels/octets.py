"""Rows of one head in the layout of products on tensor cores.

A block of rows is a tuple of its parts, [chunks, rows, channels]. Rows come in octets: with 8 rows of a chunk in a
warp, a load that gives each lane 8 channels has the layout of an operand. The compiler deals out the lanes of a load:
first along the channels, then along the first dimension, since Triton 3.7 along the last but one; so that is where the
8 rows are.
"""

import triton
import triton.language as tl

from depthroute.ops.kernels.rows import as_loaded

ROWS_FIRST = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7))


@triton.jit
def pointers_at(table, n, there, dtype: tl.constexpr):
    """Entries n of a table of addresses, as pointers known to be aligned for vector loads; null where not there."""
    addresses = tl.load(table + n, mask=there, other=0)
    return tl.multiple_of(addresses.to(tl.pointer_type(dtype)), [16])


@triton.jit
def channels(part: tl.constexpr, C: tl.constexpr, W: tl.constexpr, P: tl.constexpr):
    """Channels of a head in one part of each chunk, [chunks, channels of a part]."""
    return tl.arange(0, C)[:, None] * (P * W) + part * W + tl.arange(0, W)[None, :]


@triton.jit
def octet_rows(R: tl.constexpr):
    """Numbers of R rows, [8, 1, R / 8, 1] or [R / 8, 1, 8, 1]: loads of them have the layout of the products."""
    if ROWS_FIRST:
        rows = tl.arange(0, 8)[:, None, None, None] + 8 * tl.arange(0, R // 8)[None, None, :, None]
    else:
        rows = 8 * tl.arange(0, R // 8)[:, None, None, None] + tl.arange(0, 8)[None, None, :, None]
    return rows


@triton.jit
def octets_at(table, octets, there, dtype: tl.constexpr):
    """Entries of a table of addresses, as pointers known to be aligned for vector loads; null where not there."""
    addresses = tl.load(table + octets, mask=there, other=0)
    return tl.multiple_of(addresses.to(tl.pointer_type(dtype)), [16, 16, 16, 16])


@triton.jit
def octet_channels(part: tl.constexpr, C: tl.constexpr, W: tl.constexpr, P: tl.constexpr):
    """Channels of a head in one part of each chunk, [1, chunks, 1, channels of a part]."""
    return channels(part, C, W, P)[None, :, None, :]


@triton.jit
def load_octets(pointers, offset, there, K: tl.constexpr, C: tl.constexpr, W: tl.constexpr, P: tl.constexpr):
    """One head's channels of the rows at `pointers`, which are octets, from `offset` on: for each part [C, rows, W]."""
    rows = ()  # type: tuple[tl.tensor, ...]
    for part in tl.static_range(P):
        k = octet_channels(part, C, W, P)
        values = tl.load(pointers + (offset + k), mask=there & (k < K), other=0.0)
        values = tl.trans(values, (1, 2, 0, 3) if ROWS_FIRST else (1, 0, 2, 3))
        rows = rows + (tl.reshape(values, (C, there.shape[0] * there.shape[2], W)),)  # noqa: RUF005
    return rows


@triton.jit
def as_octets(rows):
    """[chunks, rows, channels] as `load_octets` loads it."""
    C: tl.constexpr = rows.shape[0]
    R: tl.constexpr = rows.shape[1]
    return tl.trans(tl.reshape(rows, (C, R // 8, 8, rows.shape[2])), (2, 0, 1, 3) if ROWS_FIRST else (1, 0, 2, 3))


@triton.jit
def _regrouped(x, A: tl.constexpr, B: tl.constexpr):
    """Channels, A groups of B pairs, as B groups of A pairs."""
    C: tl.constexpr = x.shape[0]
    R: tl.constexpr = x.shape[1]
    W: tl.constexpr = x.shape[2]
    return tl.reshape(tl.trans(tl.reshape(x, (C, R, A, B, 2)), (0, 1, 3, 2, 4)), (C, R, W))


@triton.jit
def dealt(x, dtype: tl.constexpr):
    """Channels in the order of a product on tensor cores, so that a lane has neighbours of memory."""
    return x if dtype == tl.float32 else _regrouped(x, 4, x.shape[2] // 8)


@triton.jit
def gathered(x, dtype: tl.constexpr):
    """The order of memory again."""
    return x if dtype == tl.float32 else _regrouped(x, x.shape[2] // 8, 4)


@triton.jit
def arrived(rows):
    """The same values, here in the program: what is done with them is not moved up to their loads."""
    return as_loaded(rows, False)


@triton.jit
def turned_round(rows):
    """Each part [C, W, rows], for a product over the rows: what passes shared memory."""
    out = ()  # type: tuple[tl.tensor, ...]
    for part in tl.static_range(len(rows)):
        out = out + (tl.trans(rows[part], (0, 2, 1)),)  # noqa: RUF005
    return arrived(out)


@triton.jit
def high_and_low(x, dtype: tl.constexpr):
    """x in fp32 as a high and a low part of a narrower type."""
    high = x.to(dtype)
    return high, (x - high.to(tl.float32)).to(dtype)
