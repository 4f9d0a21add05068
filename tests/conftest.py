"""What every test needs said before anything is imported."""

import os

import torch

# Kernels are interpreted where there is no CUDA device; Triton looks when it is imported, and transformers imports it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
