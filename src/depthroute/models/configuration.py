"""The configuration of a depth-routed model: a stock decoder's configuration and a residual scheme."""

from __future__ import annotations

import difflib
from typing import Any

from transformers import AutoConfig
from transformers.configuration_utils import PreTrainedConfig

from depthroute import residual as schemes
from depthroute.errors import nearest
from depthroute.models.compat import DecoderSubConfig

# Pre-norm decoders whose stock forward is the loop of decoder.py. Names of modules are not enough to tell (some have
# the same names and compute something else), so each is here by a test of bit-equality.
SUPPORTED_DECODERS = ("llama", "mistral", "qwen2", "qwen3")

_FROM_DECODER = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "initializer_range",
)


class DepthRoutedConfig(DecoderSubConfig, PreTrainedConfig):
    """Configuration of `DepthRoutedForCausalLM`.

    Args:
        decoder: the configuration of a stock pre-norm decoder (Llama, Mistral, Qwen2 or Qwen3), as an object or a
            dictionary with its `model_type`.
        residual: the scheme and its options, for example `{"scheme": "mhar", "num_heads": "kv"}`. Checked here, and
            stored with every default written out.

    Raises ValueError for an unsupported decoder, an unknown scheme, an unknown or unfit option.
    """

    model_type = "depthroute"

    decoder: Any = None
    residual: Any = None
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        self.decoder = _decoder_config(self.decoder)
        if getattr(self.decoder, "is_causal", True) is False:
            raise ValueError(
                "decoder.is_causal is False, but must be True: a depth-routed decoder reads from left to right"
            )
        self.residual = schemes.resolve(
            {"scheme": "additive"} if self.residual is None else self.residual, self.decoder
        )
        _refuse_misspelt(kwargs)
        # A loaded file brings these back at the top level; the decoder's own are the ones that hold.
        for name in _FROM_DECODER:
            kwargs.pop(name, None)
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            if kwargs.get(name) is None:
                kwargs[name] = getattr(self.decoder, name)
        self.tie_word_embeddings = self.decoder.tie_word_embeddings
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        # transformers only warns, and then makes a model of default size, which few machines hold.
        found = config_dict.get("model_type", cls.model_type)
        if found != cls.model_type:
            raise ValueError(
                f"model_type is {found!r}, but must be {cls.model_type!r}; "
                "depthroute.convert_checkpoint makes a depth-routed model of a stock one"
            )
        # A decoder from a file is taken as it is: files have fields of all ages.
        if isinstance(decoder := config_dict.get("decoder"), dict) and decoder.get("model_type") in SUPPORTED_DECODERS:
            config_dict = {**config_dict, "decoder": AutoConfig.for_model(**decoder)}
        return super().from_dict(config_dict, **kwargs)

    @property
    def use_cache(self) -> bool:
        return self.decoder.use_cache

    @use_cache.setter
    def use_cache(self, value: bool) -> None:
        self.decoder.use_cache = value


def _forward_to_decoder(name: str) -> property:
    return property(lambda config: getattr(config.decoder, name), doc=f"`{name}` of the decoder.")


# Trainer, generate and lm-eval ask the top-level configuration for these.
for _name in _FROM_DECODER:
    setattr(DepthRoutedConfig, _name, _forward_to_decoder(_name))


def _refuse_misspelt(kwargs: dict[str, Any]) -> None:
    """transformers keeps any keyword as an attribute, so that a typo would quietly give the plain Transformer."""
    for key in kwargs:
        if difflib.get_close_matches(key, ("decoder", "residual"), n=1, cutoff=0.75):
            raise ValueError(f"DepthRoutedConfig: unknown argument {key!r}{nearest(key, ('decoder', 'residual'))}")
        if key in schemes.option_names():
            raise ValueError(f"DepthRoutedConfig: {key!r} belongs into residual={{'scheme': ..., {key!r}: ...}}")


def _decoder_config(decoder: Any) -> PreTrainedConfig:
    if decoder is None:
        decoder = {"model_type": "qwen3"}
    if not isinstance(decoder, dict | PreTrainedConfig):
        raise TypeError(
            f"decoder is {type(decoder).__name__}, but must be a transformers configuration or a dictionary"
        )
    model_type = decoder.get("model_type") if isinstance(decoder, dict) else decoder.model_type
    if model_type not in SUPPORTED_DECODERS:
        raise ValueError(
            f"decoder.model_type is {model_type!r}, but must be one of {', '.join(SUPPORTED_DECODERS)}: "
            "only decoders whose blocks are known to be pre-norm can be routed"
        )
    if isinstance(decoder, PreTrainedConfig):
        return decoder
    values = {key: value for key, value in decoder.items() if key != "model_type"}
    known = AutoConfig.for_model(model_type).to_dict()
    for key in values.keys() - known.keys():
        if values[key] not in (None, False) and difflib.get_close_matches(key, known, n=1, cutoff=0.9):
            raise ValueError(f"decoder: unknown field {key!r}{nearest(key, known)}")
    return AutoConfig.for_model(model_type, **values)
