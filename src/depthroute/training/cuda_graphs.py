"""CUDA graphs of a compiled model: whether they can be, and gradients that outlive them.

`torch.compile(mode="reduce-overhead")` records the kernels of a forward and of a backward, and then replays them. What
they return lies in the memory of the graphs, which the next forward writes anew. That forward begins a new round by
itself once the backward of the one before has run, so a training loop has no round to mark.
"""

from __future__ import annotations

import torch
from torch import nn

MODE = "reduce-overhead"  # of torch.compile


def check_cuda_graphs(ranks: int) -> None:
    """Raise ValueError where `training.cuda_graphs` cannot be, in a run of so many processes on this machine."""
    if ranks > 1:
        raise ValueError(
            f"training.cuda_graphs is true, but should be false in a run of {ranks} processes: "
            "between several devices gradients and weights travel outside of the graphs"
        )
    if not torch.cuda.is_available():
        raise ValueError("training.cuda_graphs is true, but should be false where torch sees no CUDA device")


def own_gradients(model: nn.Module) -> None:
    """Copy the gradients out of the memory of the graphs, so that those of the next microbatches can be added to them.

    For after the first backward of a step that has several. Autograd makes the tensors that a backward returns the
    gradients, without a copy, and the next forward would overwrite them; later ones are added to these in place.
    """
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone()
