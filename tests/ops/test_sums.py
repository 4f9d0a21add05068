"""Sums over the parts of a weight's gradient."""

import pytest
import torch

from ops.cases import on_fp32

pytest.importorskip("triton", reason="needs Triton, which has no build for this platform")

from depthroute.ops.kernels.sums import sum_parts


@on_fp32
@pytest.mark.parametrize(("P", "D"), [(1, 8), (3, 20), (64, 48), (130, 67), (300, 20), (1100, 17)])
def test_all_rows_are_summed_and_the_second_one_in_its_own_dtype(target, P, D, poisoned_memory):
    parts = torch.randn(P, 2, D, device=target[0])
    close = {"rtol": 1e-5, "atol": P * 1e-7}  # the order of a sum in fp32
    both, nothing = sum_parts(parts)
    torch.testing.assert_close(both, parts.sum(0), **close)
    assert not len(nothing)
    first, second = sum_parts(parts, torch.bfloat16)
    torch.testing.assert_close(first, parts[:, 0].sum(0), **close)
    assert second.dtype == torch.bfloat16
    torch.testing.assert_close(second.float(), parts[:, 1].sum(0), rtol=1e-2, atol=1e-2)
