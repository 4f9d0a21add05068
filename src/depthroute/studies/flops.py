"""Training FLOPs of one token, counted from the modules of a decoder and the reads of a residual scheme.

What is counted, forward plus a backward of twice the forward:

    weights     6 for each weight of every linear layer, the output head among them. A tied embedding is counted once,
                as the output head; looking a row up costs nothing.
    attention   12 * T * A for each layer: the scores and the weighted sum of values over all T positions, A = attention
                heads * head dimension. `causal=True` counts the half that a causal kernel computes.
    routing     of a read over N sources, 24 * N * D: two for each channel in the sum of squares, in the scaling of the
                key, in the dot product with the query and in the weighted sum, so 8 forward.
                of a weighted average of N outputs (denseformer), 6 * N * D.
                of hyper-connections with n streams, for each sublayer 3 * (4 n D + 2 n^2 D): its read, its write and
                its mix; the dynamic form adds 3 * (4 n D + 2 n D (n + 2)): the norm of the streams and its projections.
                of mhc the same with 3 * (4 n D + 2 n D (2 n + n^2)): all streams together are projected to all weights.

Not counted, for any arm: norms, rotary embedding, activation functions, softmax, additions to a stream, the optimizer,
what gradient checkpointing computes again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from depthroute import residual as schemes
from depthroute.data.tokenization import load_tokenizer, vocabulary_size
from depthroute.models.presets import decoder_config
from depthroute.residual.base import Residual
from depthroute.training.pretrained import decoder_at_hand
from depthroute.training.recipe import Recipe

_BACKWARD = 3  # forward once, backward twice
_READ_SCHEMES = ("mhar", "block_mhar", "delta_mhar")


@dataclass(frozen=True)
class TokenFlops:
    """Training FLOPs of one token: of weights (output head included), attention scores and values, and routing.

    `parameters`: how many the model has, the scheme's among them; a tied embedding counts once.
    """

    weights: float
    output_head: float
    attention: float
    routing: float
    parameters: int

    @property
    def baseline(self) -> float:
        """Without routing: what the same model costs with the additive scheme."""
        return self.weights + self.attention

    @property
    def total(self) -> float:
        return self.baseline + self.routing

    @property
    def routing_share(self) -> float:
        """Routing as a fraction of the rest."""
        return self.routing / self.baseline


def token_flops(
    decoder: Any, residual: Mapping[str, Any] | None = None, *, sequence_length: int, causal: bool = False
) -> TokenFlops:
    """Training FLOPs of one token of `decoder` (a configuration) under a residual scheme (additive by default).

    Raises ValueError for a scheme whose arithmetic is not counted here.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(decoder)
        scheme = schemes.build(dict(residual or {"scheme": "additive"}), decoder)
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    head = model.get_output_embeddings().weight.numel()
    attention_width = sum(module.in_features for name, module in linear.items() if name.endswith(".o_proj"))
    return TokenFlops(
        weights=2 * _BACKWARD * sum(module.weight.numel() for module in linear.values()),
        output_head=2 * _BACKWARD * head,
        attention=4 * _BACKWARD * sequence_length * attention_width * (0.5 if causal else 1.0),
        routing=_BACKWARD * _routing_forward(scheme, (residual or {}).get("scheme", "additive"), decoder.hidden_size),
        parameters=_parameters(model, scheme),
    )


def count_parameters(decoder: Any, residual: Mapping[str, Any]) -> int:
    """How many parameters `decoder` (a configuration) has under any registered residual scheme, the scheme's included.

    A tied embedding counts once.
    """
    with torch.device("meta"):
        return _parameters(AutoModelForCausalLM.from_config(decoder), schemes.build(dict(residual), decoder))


def recipe_flops(recipe: Recipe) -> TokenFlops | None:
    """`token_flops` of the model that a recipe trains; None where `why_not_counted` gives a reason."""
    if why_not_counted(recipe):
        return None
    return token_flops(recipe_decoder(recipe), recipe.residual, sequence_length=recipe.data.sequence_length)


def why_not_counted(recipe: Recipe) -> str:
    """Why the FLOPs of a recipe cannot be told here, in words without a full stop; empty where they can."""
    if recipe_decoder(recipe) is None:
        return f"model.checkpoint {recipe.model.checkpoint!r} is no folder on this machine"
    if recipe.residual["scheme"] not in _counted_schemes():
        return f"the FLOPs of the scheme {recipe.residual['scheme']!r} are not counted in studies/flops.py"
    return ""


def recipe_decoder(recipe: Recipe) -> Any | None:
    """The configuration of the decoder that a recipe trains; None for a checkpoint that is no folder on this machine.

    Nothing is fetched: the vocabulary of a preset is the recipe's own, else that of its tokenizer where it is at hand,
    else the preset's.
    """
    return decoder_at_hand(recipe.model.checkpoint) if recipe.model.checkpoint else _preset_decoder(recipe)


def _parameters(*modules: nn.Module) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def _counted_schemes() -> tuple[str, ...]:
    return ("additive", "denseformer", *_READ_SCHEMES, *_STREAM_SCHEMES)


def _preset_decoder(recipe: Recipe) -> Any:
    name = recipe.data.tokenizer
    at_hand = "vocab_size" not in recipe.model.decoder and (name == "embedded" or Path(name).exists())
    known = {"vocab_size": vocabulary_size(load_tokenizer(name))} if at_hand else {}
    return decoder_config(str(recipe.model.preset), **known, **recipe.model.decoder)


def _routing_forward(scheme: Residual, name: str, width: int) -> float:
    """FLOPs of one token, forward."""
    if name == "additive":
        return 0.0
    if name in _READ_SCHEMES:
        return 8.0 * width * sum(len(scheme.source_names(site)) for site in range(scheme.num_sites))
    if name == "denseformer":
        return 2.0 * width * sum(parameter.numel() for parameter in scheme.parameters())
    if name in _STREAM_SCHEMES:
        n = scheme.options.num_streams
        used = 4 * n * width + 2 * n * n * width
        return (scheme.num_sites - 1) * (used + _STREAM_SCHEMES[name](scheme.options, width))
    known = ", ".join(_counted_schemes())
    raise ValueError(f"residual.scheme: the FLOPs of {name!r} are not counted (counted: {known})")


def _dynamic_weights(options: Any, width: int) -> float:
    n = options.num_streams
    return 4.0 * n * width + 2 * n * width * (n + 2) if options.dynamic else 0.0


def _manifold_weights(options: Any, width: int) -> float:
    n = options.num_streams
    return 4.0 * n * width + 2 * n * width * (2 * n + n * n)


# How schemes with streams make the weights of one site.
_STREAM_SCHEMES = {"hyper_connections": _dynamic_weights, "mhc": _manifold_weights}
