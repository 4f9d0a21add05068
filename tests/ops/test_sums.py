"""Sums over the parts of a weight's gradient."""

import pytest
import torch

from ops.cases import on_fp32

pytest.importorskip("triton", reason="needs Triton, which has no build for this platform")

from depthroute.ops.kernels.sums import sum_columns, sum_parts, sum_weights
from depthroute.ops.two_phase import algebra


def close(P):
    return {"rtol": 1e-5, "atol": P * 1e-7}  # the order of a sum in fp32


@on_fp32
@pytest.mark.parametrize(("P", "D"), [(1, 8), (3, 20), (64, 48), (130, 67), (300, 20), (1100, 17)])
def test_all_rows_are_summed_in_the_wanted_dtype(target, P, D, poisoned_memory):
    parts = torch.randn(P, 2, D, device=target[0])
    torch.testing.assert_close(sum_parts(parts), parts.sum(0), **close(P))
    rounded = sum_parts(parts, torch.bfloat16)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), parts.sum(0), rtol=1e-2, atol=1e-2)
    first, others = sum_columns(parts.flatten(1), D, torch.bfloat16)
    torch.testing.assert_close(first, parts[:, 0].sum(0), **close(P))
    assert torch.equal(others, rounded[1])


@on_fp32
@pytest.mark.parametrize(("sites", "P", "B", "D"), [(1, 3, 0, 20), (4, 300, 130, 17), (9, 1100, 5, 24), (3, 0, 260, 8)])
def test_the_weights_of_all_sites_are_summed_at_once(target, sites, P, B, D, poisoned_memory):
    of_inter = torch.randn(B, sites, D, device=target[0]) if B else None
    # A site that nobody read from has no part; with no merge at all the inter read is all that there is.
    of_merges = [torch.randn(P, D, device=target[0]) if P and site != 2 else None for site in range(sites)]
    actual = sum_weights(of_inter, of_merges)
    torch.testing.assert_close(actual, algebra.sum_weights(of_inter, of_merges), **close(P + B))
    assert torch.equal(actual, sum_weights(of_inter, of_merges))
