"""The one forward loop: a stock decoder's own modules, joined by a residual scheme."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults

from depthroute import residual as schemes
from depthroute.models.compat import CACHE
from depthroute.models.configuration import DepthRoutedConfig
from depthroute.residual.base import Residual, State

_LAYER_CHILDREN = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_MODEL_CHILDREN = {"embed_tokens", "layers", "norm", "rotary_emb"}


class DepthRoutedDecoderLayer(GradientCheckpointingLayer):
    """The two sublayers of one stock decoder layer, reading and writing through the scheme.

    Both stay in one module, since layers are what checkpointing and, for most schemes, FSDP wrap.
    """

    self_attn: nn.Module
    mlp: nn.Module
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module

    def __init__(self, stock: nn.Module, index: int) -> None:
        super().__init__()
        _adopt(self, stock, _LAYER_CHILDREN)
        self.index = index

    def forward(self, *state: Tensor, residual: Residual, **kwargs: Any) -> State:
        return self.run_sublayers(*state, residual=residual, **kwargs)

    def run_sublayers(self, *state: Tensor, residual: Residual, **kwargs: Any) -> State:
        """What `forward` computes; a method of its own so that it can be compiled inside of checkpointing."""
        attention, mlp = 2 * self.index, 2 * self.index + 1
        x, state = residual.read(state, attention, self.input_layernorm)
        y, _ = self.self_attn(hidden_states=x, **kwargs)
        state = residual.write(state, y, attention)
        x, state = residual.read(state, mlp, self.post_attention_layernorm)
        return residual.write(state, self.mlp(x), mlp)


class DepthRoutedPreTrainedModel(PreTrainedModel):
    config: DepthRoutedConfig  # transformers takes the configuration class from this annotation
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DepthRoutedDecoderLayer"]
    _skip_keys_device_placement = [CACHE]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    _supports_attention_backend = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        # The modules of a scheme that own parameters know how these start.
        if hasattr(module, "reset_parameters") and type(module).__module__.startswith("depthroute."):
            module.reset_parameters()  # type: ignore[operator]


class DepthRoutedModel(DepthRoutedPreTrainedModel):
    """Token ids (B, T) -> hidden states (B, T, D)."""

    embed_tokens: nn.Module
    layers: nn.ModuleList
    norm: nn.Module
    rotary_emb: nn.Module

    def __init__(self, config: DepthRoutedConfig) -> None:
        super().__init__(config)
        config.decoder._attn_implementation = config._attn_implementation
        _adopt(self, AutoModel.from_config(config.decoder, dtype=torch.get_default_dtype()), _MODEL_CHILDREN)
        # The stock module gives the padding token's row no gradient. Where that is the end of text too, as in many
        # tokenizers, it stands between packed documents.
        embedding: Any = self.embed_tokens
        embedding.padding_idx = None
        self.layers = nn.ModuleList(DepthRoutedDecoderLayer(layer, i) for i, layer in enumerate(self.layers))
        self.residual = schemes.build(config.residual, config.decoder)
        self.gradient_checkpointing = False
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed_tokens = value

    @can_return_tuple
    @merge_with_config_defaults
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Run the decoder; arguments as those of the stock model (`cache` and `past_key_values` are one thing).

        `output_hidden_states` gives what the attention of each layer reads, before its norm, and then the last
        hidden state: for `additive` these are the stock model's.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        cache = past_key_values if cache is None else cache
        decoder, residual = self.config.decoder, self.residual
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        _check_is_there(residual, x)
        if use_cache and cache is None:
            cache = DynamicCache(config=decoder)
        alone = attention_mask is None and cache is None and position_ids is None
        if position_ids is None:
            seen = 0 if cache is None else cache.get_seq_length()
            position_ids = (torch.arange(x.shape[1], device=x.device) + seen).unsqueeze(0)
        masks = attention_mask
        # `generate` may have made them already.
        if not isinstance(masks, dict) and not (alone and _needs_no_mask(decoder, x.shape[1])):
            masks = create_masks_for_generate(decoder, x, attention_mask, cache, position_ids)
        shared = {
            "position_ids": position_ids,
            "position_embeddings": self.rotary_emb(x, position_ids),
            "use_cache": use_cache,
            CACHE: cache,
            **kwargs,
        }

        hidden_states: list[Tensor] = []
        state = residual.start(x)
        for i, layer in enumerate(self.layers):
            if output_hidden_states:
                hidden_states.append(residual.read(state, 2 * i, nn.Identity())[0])
            mask = masks[decoder.layer_types[i]] if isinstance(masks, dict) else masks
            state = layer(*state, residual=residual, attention_mask=mask, **shared)
        x = self.norm(residual.finish(state))

        return BaseModelOutputWithPast(
            last_hidden_state=x,
            hidden_states=(*hidden_states, x) if output_hidden_states else None,
            **{CACHE: cache if use_cache else None},
        )


def _check_is_there(residual: nn.Module, x: Tensor) -> None:
    """Accelerate brings an offloaded module's weights when it is called; a scheme's are read by every layer."""
    first = next(residual.parameters(), None)
    if first is not None and first.is_meta and not x.is_meta:
        raise RuntimeError(
            "model.residual is offloaded, but every layer reads from it, and it is tiny; wanted a device for it: an "
            'entry "model.residual" in device_map, or more max_memory'
        )


def _needs_no_mask(decoder: Any, length: int) -> bool:
    """Whether whole sequences of some length, without padding, need no mask beside SDPA's own causal one.

    transformers finds that out itself, but not while torch.compile traces (before torch 2.14): there it makes a mask of
    all positions, and attention takes twice as long.
    """
    window = getattr(decoder, "sliding_window", None)
    return (
        decoder._attn_implementation == "sdpa"
        and set(getattr(decoder, "layer_types", ())) <= {"full_attention", "sliding_attention"}
        and getattr(decoder, "is_causal", True)
        and (window is None or length < window)
    )


def _adopt(module: nn.Module, stock: nn.Module, wanted: set[str]) -> None:
    """Make the children of a stock module the children of ours, under the same names; refuse unexpected ones."""
    found = {name for name, _ in stock.named_children()}
    if found != wanted:
        raise ValueError(f"{type(stock).__name__} has the modules {sorted(found)}, but must have {sorted(wanted)}")
    for name, child in stock.named_children():
        setattr(module, name, child)
