"""The optimizer's groups and the schedule."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import nn

from depthroute.training.optim import (
    build_optimizer,
    build_scheduler,
    clean_name,
    parameter_groups,
    rate_ratio,
    residual_parameters,
)
from depthroute.training.recipe import OptimizerRecipe
from support.models import routed


class Wrapped(nn.Module):
    """A model with the names of ours: a matrix, a vector, and two parameters of a scheme."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.projection = nn.Linear(4, 4)
        self.model.residual = nn.Module()
        self.model.residual.query = nn.Parameter(torch.ones(4))
        self.model.residual.mixing = nn.Parameter(torch.ones(4, 4))
        self.model.residual_gain = nn.Parameter(torch.ones(1))  # not of the scheme, whatever its name begins with


def sizes(model: nn.Module, **settings) -> dict[str, tuple[int, float, float]]:
    """Parameters, decay and rate of each group."""
    groups = parameter_groups(model, OptimizerRecipe(learning_rate=0.1, **settings))
    return {g["name"]: (sum(p.numel() for p in g["params"]), g["weight_decay"], g["lr"]) for g in groups}


def test_the_residual_has_its_own_decay_and_rate():
    found = sizes(Wrapped(), weight_decay=0.3, residual_weight_decay=0.2, residual_lr_multiplier=5.0)
    assert found == {"main": (16 + 4 + 1, 0.3, 0.1), "residual": (4 + 16, 0.2, 0.5)}


def test_the_residual_does_not_decay_by_default():
    assert sizes(Wrapped())["residual"] == (20, 0.0, 0.1)


def test_matrices_alone_decay_where_the_recipe_says_so():
    found = sizes(Wrapped(), decay="matrices")
    assert found == {"main": (16, 0.1, 0.1), "undecayed": (5, 0.0, 0.1), "residual": (20, 0.0, 0.1)}


@pytest.mark.parametrize("tied", [True, False])
def test_projections_are_the_matrices_of_linear_layers_alone(tied):
    model = routed({"scheme": "delta_mhar"}, "qwen2", tie_word_embeddings=tied)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, OptimizerRecipe(decay="projections", weight_decay=0.05))
    found = {group["name"]: {names[id(parameter)] for parameter in group["params"]} for group in groups}
    kinds = {name: {re.sub(r"^model\.layers\.\d+\.", "", full) for full in members} for name, members in found.items()}
    attention = {f"self_attn.{letter}_proj" for letter in "qkvo"}
    mlp = {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    head = set() if tied else {"lm_head.weight"}
    assert kinds["main"] == {f"{name}.weight" for name in attention | mlp} | head
    norms = {"input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight"}
    biases = {f"{name}.bias" for name in attention - {"self_attn.o_proj"}}
    assert kinds["undecayed"] == norms | biases | {"model.embed_tokens.weight"}
    assert {name.split(".")[-1] for name in found["residual"]} == {"query", "norm_weight", "null_source", "gate"}
    assert {group["name"]: group["weight_decay"] for group in groups} == {"main": 0.05, "undecayed": 0, "residual": 0}


def test_matrices_decay_with_the_embedding_and_projections_without():
    model = routed({"scheme": "additive"})
    embedding = model.model.embed_tokens.weight
    for decay, name in (("all", "main"), ("matrices", "main"), ("projections", "undecayed")):
        groups = {group["name"]: group["params"] for group in parameter_groups(model, OptimizerRecipe(decay=decay))}
        assert any(parameter is embedding for parameter in groups[name]), decay


def test_frozen_parameters_are_in_no_group_and_empty_groups_are_left_out():
    model = Wrapped()
    model.model.residual.requires_grad_(False)
    assert sizes(model) == {"main": (21, 0.1, 0.1)}


def test_every_parameter_of_a_tied_model_is_in_one_group():
    model = Wrapped()
    model.head = nn.Linear(4, 4, bias=False)
    model.head.weight = model.model.projection.weight
    assert sizes(model)["main"][0] == 21


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."])
def test_wrappers_do_not_hide_the_residual(prefix):
    assert clean_name(f"{prefix}model.residual.reads.0.query") == "model.residual.reads.0.query"
    assert clean_name(f"{prefix}model._orig_mod.residual.query") == "model.residual.query"


def test_a_compiled_model_has_the_same_groups():
    model = Wrapped()
    assert sizes(torch.compile(model)) == sizes(model)
    assert sum(p.numel() for p in residual_parameters(torch.compile(model))) == 20


def test_decay_and_multiplier_act_on_the_step():
    settings = OptimizerRecipe(
        learning_rate=0.1, weight_decay=0.5, residual_weight_decay=0.25, residual_lr_multiplier=2.0
    )
    model = Wrapped()
    before = model.model.projection.weight.detach().clone()
    optimizer = build_optimizer(model, settings)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(model.model.projection.weight.detach(), before * (1 - 0.1 * 0.5))
    torch.testing.assert_close(model.model.residual.query.detach(), torch.full((4,), 1 - 0.2 * 0.25))


def test_the_rate_follows_its_formula():
    def formula(step: int) -> float:
        return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - 10) / 90))

    recipe = OptimizerRecipe(warmup_steps=10, min_lr_ratio=0.1)
    found = [rate_ratio(step, 100, recipe) for step in range(100)]
    assert found[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert found[10:] == pytest.approx([formula(step) for step in range(10, 100)])
    assert found[0] > 0
    assert found[9] == found[10] == 1.0
    assert rate_ratio(100, 100, recipe) == rate_ratio(1000, 100, recipe) == pytest.approx(0.1)


def test_the_linear_schedule_is_a_line_and_the_constant_one_stays():
    linear = OptimizerRecipe(warmup_steps=0, min_lr_ratio=0.5, schedule="linear")
    assert [rate_ratio(step, 4, linear) for step in range(5)] == pytest.approx([1.0, 0.875, 0.75, 0.625, 0.5])
    constant = OptimizerRecipe(warmup_steps=2, schedule="constant")
    assert [rate_ratio(step, 4, constant) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]


def test_the_schedule_scales_the_rate_of_each_group():
    recipe = OptimizerRecipe(learning_rate=0.1, warmup_steps=4, residual_lr_multiplier=3.0)
    optimizer = build_optimizer(Wrapped(), recipe)
    scheduler = build_scheduler(optimizer, 10, recipe)
    for step in range(10):
        ratio = rate_ratio(step, 10, recipe)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1 * ratio, 0.3 * ratio])
        optimizer.step()
        scheduler.step()
