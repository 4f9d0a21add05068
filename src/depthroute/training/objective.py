"""What training minimises: the cross-entropy, and the z-loss where a recipe has one."""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast


def return_objective(model: nn.Module, z_loss: float) -> None:
    """In training mode let a model return what is minimised as its loss, without the logits, and make no cache.

    That is its own loss + `z_loss` * `mean_square_log_normalizer`; in evaluation mode it is as before. Both are made
    inside the model's forward: Accelerate turns what a model returns into fp32, and a compiled graph has to store it,
    and for a vocabulary of 150,000 words the logits are more memory than all the rest of the step.
    """
    whole: Any = type(model).forward

    @functools.wraps(whole)
    def forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not model.training:
            return whole(model, *args, **kwargs)
        output = whole(model, *args, **{"use_cache": False, **kwargs})
        loss = output.loss
        if z_loss:
            items = kwargs.get("num_items_in_batch")
            loss = loss + z_loss * mean_square_log_normalizer(output.logits, kwargs["labels"], items)
        return CausalLMOutputWithPast(loss=loss)

    model.forward = MethodType(forward, model)


def mean_square_log_normalizer(logits: Tensor, labels: Tensor, num_items: Tensor | int | None = None) -> Tensor:
    """The mean over predicted tokens of (log sum exp of the logits)^2, in fp32: z-loss before its weight.

    Logits (B, T, V) and labels (B, T) as a causal model has them: token t predicts label t + 1, and -100 is not
    predicted. `num_items` is the number of predicted tokens of the whole step where this is a part of its batch; the
    parts then sum to the mean over the step, as those of the cross-entropy do. Source: PaLM (arXiv 2204.02311,
    section 5), with the weight 1e-4.
    """
    predicted = labels[:, 1:] != -100
    # Of all tokens, as the cross-entropy has it: compiled, the two share one pass over the logits.
    squares = logits.float().logsumexp(-1)[:, :-1].square() * predicted
    return squares.sum() / (predicted.sum() if num_items is None else num_items)
