"""The language model: the depth-routed decoder, its head and its loss."""

from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from depthroute.models.compat import CACHE
from depthroute.models.configuration import DepthRoutedConfig
from depthroute.models.decoder import DepthRoutedModel, DepthRoutedPreTrainedModel


class DepthRoutedForCausalLM(DepthRoutedPreTrainedModel, GenerationMixin):
    """A decoder with a residual scheme and a language-model head; loads, saves and generates as any other model.

    Parameters carry the names of the stock model; those of the scheme are `model.residual.*`.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: DepthRoutedConfig) -> None:
        if not isinstance(config, DepthRoutedConfig):
            raise TypeError(
                f"config is a {type(config).__name__}, but must be a DepthRoutedConfig, which holds a decoder's "
                "configuration and a residual scheme"
            )
        super().__init__(config)
        self.model = DepthRoutedModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Any = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Token ids (B, T) -> logits (B, T, V), and the loss where `labels` (B, T) are given (shifted inside).

        `logits_to_keep` gives the logits of the last n tokens alone, or of the tokens of an index.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            cache=past_key_values if cache is None else cache,
            return_dict=True,
            **kwargs,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, keep, :])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, **{CACHE: getattr(outputs, CACHE)}
        )


AutoConfig.register(DepthRoutedConfig.model_type, DepthRoutedConfig, exist_ok=True)
AutoModel.register(DepthRoutedConfig, DepthRoutedModel, exist_ok=True)
AutoModelForCausalLM.register(DepthRoutedConfig, DepthRoutedForCausalLM, exist_ok=True)
