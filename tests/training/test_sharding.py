"""FSDP2 by Accelerate: what is left to autocast, and what is refused."""

from __future__ import annotations

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import MixedPrecisionPolicy

from depthroute.training.sharding import leave_precision_to_autocast, placed_like, reshard, whole


def test_weights_are_gathered_in_fp32():
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy.output_dtype == torch.bfloat16  # the loss too
    leave_precision_to_autocast(plugin)
    assert plugin.mixed_precision_policy == MixedPrecisionPolicy()


def test_fsdp1_is_refused():
    with pytest.raises(ValueError, match="fsdp_version is 1, but should be 2"):
        leave_precision_to_autocast(FullyShardedDataParallelPlugin(fsdp_version=1))


def test_plain_tensors_stay_as_they_are():
    tensor = torch.ones(3)
    assert whole(tensor) is tensor
    assert placed_like(tensor, torch.zeros(3)) is tensor
    reshard(torch.nn.Linear(2, 2))
