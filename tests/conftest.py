"""What every test needs said before anything is imported."""

import os
import signal

# Before torch starts its threads: many tests fork, and a child's products wait for threads that only its parent has.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

# Kernels are interpreted where there is no CUDA device; Triton looks when it is imported, and transformers imports it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Whoever starts the suite in the background hands an ignored SIGINT down to it, and tests that send one would hang.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
