"""The model card (README.md in the hub's layout) that lies beside every saved model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

CARD = "README.md"

_LAYOUT = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- depthroute
---
# {name}

{opening}

```python
import depthroute, transformers
model = transformers.AutoModelForCausalLM.from_pretrained("path/to/{name}")
```

{facts}
{sections}"""


def model_card(name: str, opening: str, facts: Iterable[str], sections: str = "") -> str:
    """A card: what the model is in a sentence or two, how it is loaded, its facts as a list, and more sections."""
    lines = "".join(f"- {fact}\n" for fact in facts)
    return _LAYOUT.format(name=name, opening=opening, facts=lines, sections=f"{sections}\n" if sections else "")


def describe_scheme(residual: Mapping[str, Any]) -> str:
    """The residual scheme of a configuration with its options, as a fact of a card."""
    return "scheme: " + ", ".join(f"`{key}: {value}`" for key, value in residual.items())


def card_of_folder(folder: Path) -> str:
    """The card of a model folder: the one that is there, or one of what its config.json says."""
    file = folder / CARD
    if file.is_file():
        return file.read_text(encoding="utf-8")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    residual, decoder = config["residual"], config["decoder"]["model_type"]
    opening = f"A language model with the residual scheme `{residual['scheme']}` of depthroute."
    return model_card(folder.name, opening, [f"decoder: {decoder} in {config.get('dtype')}", describe_scheme(residual)])


def with_section(card: str, title: str, body: str) -> str:
    """The card with a section of second rank: in the place of the one of that title, or at the end."""
    section = f"## {title}\n\n{body.rstrip()}\n"
    found = re.search(rf"^## {re.escape(title)}\n.*?(?=^#{{1,2}} |\Z)", card, re.DOTALL | re.MULTILINE)
    if found is None:
        return f"{card.rstrip()}\n\n{section}"
    rest = card[found.end() :]
    return card[: found.start()] + section + (f"\n{rest}" if rest else "")
