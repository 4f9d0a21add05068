"""The kernels run compiled where there is a CUDA device, and interpreted on the CPU everywhere else."""

import os
import sys

import pytest
import torch

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    if "triton" in sys.modules:
        raise pytest.UsageError("set TRITON_INTERPRET=1: triton was imported before tests/ops could ask for it")
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def poisoned_memory():
    """Fresh memory is NaN, so that an output which nobody wrote cannot pass for a number."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
