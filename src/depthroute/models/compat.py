"""What differs between the supported releases of transformers (5.17 and later), in one place."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import AutoConfig
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

# 5.24 renamed `past_key_values` to `cache`: the keyword of every layer, the field of every output.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"

if hasattr(PreTrainedConfig, "sub_configs_defaults"):
    from transformers.configuration_utils import SubConfigSpec

    class DecoderSubConfig:
        """Mixin that tells transformers of the nested `decoder` configuration (5.24 and later)."""

        sub_configs_defaults: ClassVar[dict[str, Any]] = {
            "decoder": SubConfigSpec(config_class=AutoConfig, model_type="qwen3")
        }

else:

    class DecoderSubConfig:  # type: ignore[no-redef]
        """Mixin that tells transformers of the nested `decoder` configuration (before 5.24)."""

        sub_configs: ClassVar[dict[str, Any]] = {"decoder": AutoConfig}
