"""Initial values that `torch.nn.init` has no function for."""

from __future__ import annotations

import torch
from torch import Tensor


def fill_(param: Tensor, values: Tensor) -> None:
    """Set a whole parameter to `values`, unless transformers has just loaded it from a checkpoint.

    While transformers loads, it guards the functions of `torch.nn.init` by this mark, but not `copy_` and the like.
    """
    if not getattr(param, "_is_hf_initialized", False):
        with torch.no_grad():
            param.copy_(values)


def one_hot_(param: Tensor, index: int) -> None:
    """Set a parameter (n,) to one at `index` and zero elsewhere."""
    fill_(param, torch.arange(param.numel()) == index)
