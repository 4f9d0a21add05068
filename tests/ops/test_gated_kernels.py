"""The kernels of gated reads, and what the rounding of a partial mix does to their queries."""

from __future__ import annotations

import pytest
import torch

from depthroute.ops.kernels.settings import overriding
from depthroute.ops.reference import depth_mix
from depthroute.ops.two_phase import gated_merge, inter
from ops.cases import CUDA, INTERPRETER, on_every_target
from ops.draws import Draw, assert_close
from ops.engine_chains import error

# (width, heads, tokens, programs backward): the logits of a site and its gate are 4, 8 or 12 numbers, some of them
# padding; a program has a token, several, or fewer than the others.
GATED = [(20, 1, 5, None), (40, 2, 5, None), (40, 2, 50, 2), (36, 3, 50, 1), (84, 7, 9, 1), (96, 8, 30, 3)]


@on_every_target
@pytest.mark.parametrize("case", GATED, ids=str)
def test_the_gated_form_equals_the_algebra(target, case, poisoned_memory):
    width, heads, tokens, programs = case
    draw = Draw(target, tokens, width, heads)
    sources = [draw.row().requires_grad_() for _ in range(2)]
    rstd = [draw.stat() for _ in sources]
    weight, null, gate = (
        draw.weight(1).requires_grad_(),
        draw.weight().requires_grad_(),
        draw.normal(1).requires_grad_(),
    )
    stream, upstream = draw.normal(tokens, width).requires_grad_(), draw.normal(tokens, width)
    found = []
    with overriding(**{"gated_backward_programs": programs} if programs else {}):
        for use_kernels in (True, False):
            partials, lses, _, _ = inter(sources, rstd, weight, heads, use_kernels, exact=True)
            out = gated_merge(stream, gate, partials[0], lses[0], null, weight[0], heads, 1e-6, kernels=use_kernels)
            found.append([out, *torch.autograd.grad(out, [stream, gate, null, weight, *sources], upstream)])
    assert_close(*found, target[1])


def gated_query_gradients(target, use_kernels, seed):
    """Query gradients (S, D) of gated reads: in two phases, one by one in the same dtype, and one by one in fp64.

    The sources share a large component, which cancels in these gradients if those of the logits sum to zero.
    """
    sites, heads, tokens, width = 4, 2, 12, 64
    draw = Draw(target, tokens, width, heads, seed)
    shared = 3 * draw.normal(width)
    sources = [(draw.normal(tokens, width) + shared).to(target[1]) for _ in range(5)]
    null, gate, weight = draw.normal(width).to(target[1]), draw.normal(1).to(target[1]) / 3, draw.weight(sites)
    upstream = [draw.row() for _ in range(sites)]

    def gradient(reads, dtype):
        query = weight.clone().requires_grad_()
        rows = [source.to(dtype).requires_grad_() for source in sources]
        loss = sum((out * grad.to(dtype)).sum() for out, grad in zip(reads(query, rows), upstream, strict=True))
        return torch.autograd.grad(loss, query)[0]

    def two_phases(query, rows):
        known = [torch.rsqrt(row.float().square().mean(-1, keepdim=True) + 1e-6).expand(-1, heads) for row in rows]
        stream = torch.zeros_like(rows[0])
        partials, lses, _, _ = inter(rows, known, query, heads, use_kernels, exact=True)
        return [
            gated_merge(stream, gate, partial, lse, null, row, heads, 1e-6, kernels=use_kernels)
            for partial, lse, row in zip(partials, lses, query.unbind(0), strict=True)
        ]

    def one_by_one(query, rows):
        rows = [null.to(rows[0].dtype).expand_as(rows[0]), *rows]
        return [gate.to(rows[0].dtype) * depth_mix(rows, row, num_heads=heads, eps=1e-6) for row in query.unbind(0)]

    return gradient(two_phases, target[1]), gradient(one_by_one, target[1]), gradient(one_by_one, torch.float64)


def gated_query_errors(target, use_kernels):
    draws = [gated_query_gradients(target, use_kernels, seed) for seed in range(8)]
    ours, beside, exact = (torch.cat(each) for each in zip(*draws, strict=True))
    return error([ours], [exact]), error([beside], [exact])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_rounding_of_a_partial_mix_does_not_reach_the_queries_of_gated_reads(dtype):
    ours, beside = gated_query_errors(("cpu", dtype), use_kernels=False)
    assert ours <= 1.5 * beside  # 3.4 and 2.4 times, where it does


# The interpreter has no products in bf16.
IN_16_BITS = [pytest.param(("cpu", torch.float16), id="interpreter", marks=INTERPRETER.marks), *CUDA[1:]]


@pytest.mark.parametrize("target", IN_16_BITS)
def test_nor_does_it_in_the_kernels(target):
    ours, beside = gated_query_errors(target, use_kernels=True)
    assert ours <= 1.5 * beside
