"""Small models for tests."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, AutoModelForCausalLM

from depthroute import DepthRoutedConfig, DepthRoutedForCausalLM

FAMILIES = ("qwen3", "llama", "qwen2", "mistral")
VOCABULARY = 131


def decoder(family="qwen3", **overrides):
    """A tiny decoder configuration with nothing at its default that could hide a mistake."""
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **overrides,
    }
    if family in ("qwen3", "mistral", "llama"):
        values.setdefault("head_dim", 16)
    return AutoConfig.for_model(family, **values)


def routed(residual, family="qwen3", seed=0, **overrides):
    torch.manual_seed(seed)
    config = DepthRoutedConfig(decoder=decoder(family, **overrides), residual=residual)
    return DepthRoutedForCausalLM(config).eval()


def stock(family="qwen3", seed=0, **overrides):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(decoder(family, **overrides)).eval()


def move_off_init(model, seed=1, std=0.1):
    """Move every parameter away from its initial value."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter) * std)
    return model


def tokens(batch=2, length=11, seed=0):
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def gradients(model, **inputs):
    """The loss and the gradient of every parameter by name."""
    model.zero_grad(set_to_none=True)
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


class ExactRMSNorm(nn.Module):
    """RMSNorm in the dtype of its input; the stock one casts to fp32, which would hide small errors from fp64 tests."""

    def __init__(self, norm):
        super().__init__()
        self.weight = norm.weight
        self.variance_epsilon = norm.variance_epsilon

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


def in_fp64(model, norm_eps=None):
    """The model in fp64, every norm swapped for one that computes in fp64 (with another eps where one is given)."""
    model = model.double()
    for module in list(model.modules()):
        for name, child in module.named_children():
            if "RMSNorm" in type(child).__name__ and not isinstance(child, ExactRMSNorm):
                exact = ExactRMSNorm(child)
                exact.variance_epsilon = child.variance_epsilon if norm_eps is None else norm_eps
                setattr(module, name, exact)
    return model


def fsdp_units(model: torch.nn.Module) -> int:
    """How many units FSDP2 gathers; some are several modules."""
    return len({id(module._get_fsdp_state()) for module in model.modules() if isinstance(module, FSDPModule)})
