"""Random tensors of a read, and how close the kernels must be to the algebra."""

from __future__ import annotations

import torch

from ops.engine_chains import error

FP32 = 1e-5


def bound(dtype):
    """In 16 bits sums are taken from rounded products, and outputs are rounded."""
    return {torch.float32: FP32, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}[dtype]


class Draw:
    """Random tensors of a read of T tokens, as the ops want them."""

    def __init__(self, target, tokens, width, heads, seed=0):
        (self.device, self.dtype), self.tokens, self.width, self.heads = target, tokens, width, heads
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.generator).to(self.device)

    def row(self):
        return self.normal(self.tokens, self.width).to(self.dtype)

    def stat(self):
        return self.normal(self.tokens, self.heads).abs() + 0.5

    def weight(self, *rows):
        return self.normal(*rows, self.width) * (self.heads / self.width) ** 0.5


def flat(result):
    tensors = []
    for part in result:
        tensors += [part] if isinstance(part, torch.Tensor) else list(part)
    return tensors


def assert_close(actual, expected, dtype):
    actual, expected = flat(actual), flat(expected)
    assert len(actual) == len(expected)
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        if b.numel():
            assert error([a], [b]) <= bound(dtype), i
