"""Random queries of the same norm, and logits of parts of a query that add up to those of the read itself."""

from __future__ import annotations

import pytest
import torch

from depthroute.probing.queries import part_logits, part_weights, slice_masks, with_random_queries
from depthroute.residual import DepthRead


def read(num_heads=1, dtype=torch.float32):
    module = DepthRead(12, num_heads, scale=0.7, eps=1e-3).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        module.query.copy_(torch.randn(12, generator=generator))
        module.norm_weight.copy_(torch.rand(12, generator=generator) + 0.5)
    return module


def sources(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(2, 5, 12, generator=generator).to(dtype) * scale for scale in (0.1, 1, 9))


def test_random_queries_have_the_norm_of_the_query_and_other_directions_at_each_site():
    module = read()
    queries = with_random_queries(module, 3, draws=5, seed=0)
    assert torch.equal(queries[0], module.query)
    torch.testing.assert_close(queries.norm(dim=1), module.query.norm().expand(6))
    assert torch.equal(queries, with_random_queries(module, 3, draws=5, seed=0))
    for site, seed in ((4, 0), (3, 1)):
        assert not torch.allclose(queries[1:], with_random_queries(module, site, draws=5, seed=seed)[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("num_heads", [1, 3])
def test_the_logits_of_the_heads_give_the_weights_of_the_read(num_heads, dtype):
    module = read(num_heads, dtype)
    weights = part_weights(module, module.query[None].detach(), slice_masks(12, num_heads, module.query.device))
    for autocast in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            found = part_logits(module, sources(dtype), weights).softmax(0)
        torch.testing.assert_close(found, module.weights(sources(dtype)), rtol=1e-4, atol=1e-6)


def test_the_logits_of_slices_add_up_to_the_whole():
    module = read()
    query = module.query[None].detach()
    parts = part_logits(module, sources(), part_weights(module, query, slice_masks(12, 4, query.device)))
    whole = part_logits(module, sources(), part_weights(module, query, torch.ones(1, 12)))
    torch.testing.assert_close(parts.sum(-1, keepdim=True), whole)
