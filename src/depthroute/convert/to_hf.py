"""A depth-routed model becomes a stock one, where that is exact."""

from __future__ import annotations

import copy

from transformers import PreTrainedModel

from depthroute.convert.assembly import assemble, stock_model
from depthroute.convert.weights import check_keys, one_dtype, weights_of_module
from depthroute.models import DepthRoutedForCausalLM
from depthroute.residual.additive import Additive
from depthroute.residual.delta_mhar import DeltaMhar

_SCHEME_KEYS = "model.residual."


def to_stock(model: DepthRoutedForCausalLM) -> PreTrainedModel:
    """The stock Hugging Face model that computes exactly what `model` does; its weights are copies.

    That exists for `additive`, and for `delta_mhar` while every gate is exactly zero.

    Raises ValueError, with the reason, for any other model; TypeError for anything but a depth-routed model.
    """
    if not isinstance(model, DepthRoutedForCausalLM):
        raise TypeError(f"model is {type(model).__name__}, but must be a DepthRoutedForCausalLM")
    if reason := why_not_stock(model):
        raise ValueError(f"no stock model computes the same: {reason}")
    where = "the depth-routed model"
    weights = {
        key: weight for key, weight in weights_of_module(model, where).items() if not key.startswith(_SCHEME_KEYS)
    }
    decoder = copy.deepcopy(model.config.decoder)
    kind, wanted = stock_model(decoder)
    check_keys(weights, wanted, where, kind.__name__)
    stock = assemble(kind, decoder, weights, one_dtype(weights), model.config._attn_implementation)
    stock.to(device=model.device)
    stock.generation_config = copy.deepcopy(model.generation_config)
    return stock


def why_not_stock(model: DepthRoutedForCausalLM) -> str | None:
    """Why no stock model computes the same as `model`; None where one does."""
    residual, scheme = model.model.residual, model.config.residual["scheme"]
    if isinstance(residual, Additive):
        return None
    if not isinstance(residual, DeltaMhar):
        return f"{scheme} has no residual stream to keep; additive has, and delta_mhar while its gates are closed"
    gates = {name: value for name, value in residual.named_parameters() if name.endswith(".gate")}
    opened = [name for name, value in gates.items() if value.item() != 0.0]
    if not opened:
        return None
    first = opened[0]
    return (
        f"{len(opened)} of {len(gates)} gates are not zero, for example "
        f"{_SCHEME_KEYS}{first} = {gates[first].item():.3g}"
    )
