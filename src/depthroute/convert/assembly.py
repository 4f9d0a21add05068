"""Put checked weights into a model."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from depthroute.convert.weights import Weight
from depthroute.errors import nearest

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

_SCHEME_KEYS = "model.residual."


def stock_model(decoder: PreTrainedConfig) -> tuple[type[PreTrainedModel], dict[str, tuple[int, ...]]]:
    """The stock class of a decoder with a language-model head, and the keys and shapes of its files."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(decoder))
    # A tied head is in no file: it is the embedding.
    tied = set(model.all_tied_weights_keys) if decoder.tie_word_embeddings else set()
    shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items() if key not in tied}
    return type(model), shapes


def assemble(
    kind: Any,
    config: PreTrainedConfig,
    weights: Mapping[str, Weight],
    dtype: torch.dtype,
    attention: str | None = None,
) -> Any:
    """A transformers model of class `kind`, in evaluation mode, that holds copies of the weights in `dtype`.

    Everything that the weights do not hold must be the scheme's own and starts as the scheme starts. Draws no random
    numbers for that. `attention` names the attention backend, None takes the default.
    """
    tensors = {key: weight.read() for key, weight in weights.items()}
    options = {} if attention is None else {"attn_implementation": attention}
    with _scheme_keys_may_be_missing():
        model, report = kind.from_pretrained(
            None, config=config, state_dict=tensors, dtype=dtype, output_loading_info=True, **options
        )
    for kind_of_key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        wrong = sorted(str(key) for key in report[kind_of_key] if not str(key).startswith(_SCHEME_KEYS))
        if wrong:
            raise ValueError(f"transformers reports {kind_of_key.replace('_', ' ')}: {', '.join(wrong[:3])}")
    model.name_or_path = model.config.name_or_path = ""  # not "None"
    return model


def as_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """`dtype` as torch's; ValueError for a name or a type that models do not come in."""
    if dtype is None or dtype in _DTYPES.values():
        return dtype  # type: ignore[return-value]
    if isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype is {dtype}, but must be one of {', '.join(_DTYPES)}")
    if not isinstance(dtype, str):
        raise TypeError(f"dtype is {type(dtype).__name__}, but must be a torch.dtype or the name of one")
    if dtype not in _DTYPES:
        raise ValueError(f"dtype: unknown dtype {dtype!r}{nearest(dtype, _DTYPES)}")
    return _DTYPES[dtype]


@contextmanager
def _scheme_keys_may_be_missing() -> Iterator[None]:
    """Keep transformers from warning of keys that are missing on purpose; the report is checked afterwards."""
    logger = logging.getLogger("transformers.modeling_utils")

    def nothing(record: logging.LogRecord) -> bool:
        return False

    # A filter, since at another level the library runs other checks.
    logger.addFilter(nothing)
    try:
        yield
    finally:
        logger.removeFilter(nothing)
