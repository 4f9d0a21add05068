"""What the parameters of the reads say while they train: how far the gates are open, how long the queries are."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from depthroute.training.optim import RESIDUAL_PREFIX, clean_name
from depthroute.training.sharding import whole

Readings = dict[str, dict[str, float]]


@torch.no_grad()
def read_parameters(model: nn.Module) -> Readings:
    """`gates`: each gate's value, and `query_norms`: each query's Euclidean norm, by the name of the parameter.

    Empty for a scheme that has neither. All ranks take part.
    """
    gates: dict[str, Tensor] = {}
    norms: dict[str, Tensor] = {}
    for wrapped, parameter in model.named_parameters():
        name = clean_name(wrapped)
        if not name.startswith(RESIDUAL_PREFIX):
            continue
        if name.endswith(".gate"):
            gates[name] = whole(parameter).squeeze()
        elif name.endswith(".query"):
            norms[name] = torch.linalg.vector_norm(whole(parameter))
    return {"gates": _numbers(gates), "query_norms": _numbers(norms)}


def _numbers(values: dict[str, Tensor]) -> dict[str, float]:
    # One copy to the CPU for all of them.
    return dict(zip(values, torch.stack(list(values.values())).tolist(), strict=True)) if values else {}
