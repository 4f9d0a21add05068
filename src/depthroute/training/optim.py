"""The optimizer's parameter groups, and the schedule of the rate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from depthroute.training.recipe import OptimizerRecipe

RESIDUAL_PREFIX = "model.residual."
# What torch.compile, DDP and FSDP put into the names of parameters.
_WRAPPERS = ("_orig_mod.", "module.", "_fsdp_wrapped_module.")


def clean_name(name: str) -> str:
    """The name of a parameter as the unwrapped model has it."""
    parts = name.split(".")
    return ".".join(part for part in parts if f"{part}." not in _WRAPPERS)


def parameter_groups(model: nn.Module, recipe: OptimizerRecipe) -> list[dict[str, Any]]:
    """The groups for AdamW: each trainable parameter in exactly one of them, empty groups left out.

    "main" decays. Under `decay: matrices` parameters with fewer than two dimensions are in "undecayed" instead, under
    `decay: projections` all but the matrices of linear layers: norms, biases, and the embedding with a head that is
    tied to it. What lies under `model.residual.` is in "residual", with its own decay and a multiple of the rate,
    whatever its shape.
    """
    members: dict[str, list[nn.Parameter]] = {"main": [], "undecayed": [], "residual": []}
    embeddings = {id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if clean_name(name).startswith(RESIDUAL_PREFIX):
            members["residual"].append(parameter)
        elif (recipe.decay != "all" and parameter.ndim < 2) or (
            recipe.decay == "projections" and id(parameter) in embeddings
        ):
            members["undecayed"].append(parameter)
        else:
            members["main"].append(parameter)
    decays = {"main": recipe.weight_decay, "undecayed": 0.0, "residual": recipe.residual_weight_decay}
    multipliers = {"main": 1.0, "undecayed": 1.0, "residual": recipe.residual_lr_multiplier}
    groups = [
        {
            "name": name,
            "params": params,
            "weight_decay": decays[name],
            "lr": recipe.learning_rate * multipliers[name],
        }
        for name, params in members.items()
        if params
    ]
    _check_partition(model, groups)
    return groups


class AdamW(torch.optim.AdamW):
    """AdamW that computes on the shards of sharded tensors; its state is sharded as ever.

    Every element has a step of its own, so shards need nothing of each other. PyTorch asks DTensor for each tensor of
    each list, which takes the host longer than all the rest of the step.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        is_complex: bool = super()._init_group(group, *lists)
        for tensors in lists:
            tensors[:] = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        return is_complex


def build_optimizer(model: nn.Module, recipe: OptimizerRecipe) -> torch.optim.AdamW:
    """AdamW over `parameter_groups`, in one fused kernel for each group where the device has it."""
    groups = parameter_groups(model, recipe)
    fused = all(parameter.device.type in ("cpu", "cuda") for group in groups for parameter in group["params"])
    return AdamW(groups, lr=recipe.learning_rate, betas=(recipe.beta1, recipe.beta2), eps=recipe.eps, fused=fused)


def rate_ratio(step: int, steps: int, recipe: OptimizerRecipe) -> float:
    """The rate of step `step` (0, 1, ..., steps - 1) as a part of the peak rate.

    Linear warm-up over the first W = `warmup_steps` steps, (step + 1) / W, so that the first step moves the model;
    then from 1 towards `min_lr_ratio`, by a half cosine or a line in (step - W) / (steps - W), or constantly 1.
    """
    warmup, least = recipe.warmup_steps, recipe.min_lr_ratio
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / (steps - warmup))
    if recipe.schedule == "constant":
        return 1.0
    if recipe.schedule == "linear":
        return least + (1.0 - least) * (1.0 - progress)
    return least + (1.0 - least) * 0.5 * (1.0 + math.cos(math.pi * progress))


def build_scheduler(optimizer: torch.optim.Optimizer, steps: int, recipe: OptimizerRecipe) -> LambdaLR:
    """The schedule: `rate_ratio` times each group's own rate."""
    return LambdaLR(optimizer, lambda step: rate_ratio(step, steps, recipe))


def residual_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of the residual scheme."""
    return (p for name, p in model.named_parameters() if clean_name(name).startswith(RESIDUAL_PREFIX))


def _check_partition(model: nn.Module, groups: list[dict[str, Any]]) -> None:
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    assert len(grouped) == len(set(grouped)), "a parameter is in two groups"
    assert set(grouped) == trained, "a parameter is in no group"
