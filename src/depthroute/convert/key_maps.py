"""How the keys of a checkpoint become the keys of a depth-routed model, as data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class KeyMap:
    """What happens to each key of a checkpoint. Patterns are regular expressions of a whole key.

    renamed: pattern -> our name, with groups as `\\1`; the first that matches counts, a key that none matches keeps
        its name.
    dropped: pattern -> why nothing is lost. A key is never dropped for any other reason.
    """

    renamed: Mapping[str, str] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)

    def rename(self, key: str) -> str:
        """Our name of `key`."""
        for pattern, name in self.renamed.items():
            if match := re.fullmatch(pattern, key):
                return match.expand(name)
        return key

    def reason_to_drop(self, key: str) -> str | None:
        """Why `key` is left out; None where it is not."""
        return next((reason for pattern, reason in self.dropped.items() if re.fullmatch(pattern, key)), None)


# A stock decoder keeps its names.
STOCK = KeyMap(
    dropped={
        r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq": "computed from the rope parameters of config.json",
    }
)

# By the model type of the checkpoint. An importer of another depth-routed format is a KeyMap of its own here.
KEY_MAPS: dict[str, KeyMap] = {"llama": STOCK, "mistral": STOCK, "qwen2": STOCK, "qwen3": STOCK}

# Dropped where config.json ties it to the embedding and the two are equal bit for bit.
TIED_HEAD = "lm_head.weight"
TIED_TO = "model.embed_tokens.weight"
