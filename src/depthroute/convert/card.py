"""The model card of a converted model."""

from __future__ import annotations

from typing import Any

from depthroute.convert.check import PRECISIONS

_CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- depthroute
---
# {name}

{source}, converted by depthroute {version} with the residual scheme
`{scheme}`. It has been trained no further: what it computes is what the table says. The licence of {source} holds.

```python
import depthroute, transformers
model = transformers.AutoModelForCausalLM.from_pretrained("{name}")
```

- decoder: {architecture}, {parameters:,} parameters in {dtype}, of which {residual_parameters:,} are the scheme's
- scheme: {options}

{check}
"""

_CHECK = """\
Beside {source}, on {tokens} tokens of {text}:

| precision | largest logit deviation | relative | same top token | loss before | loss after |
|---|---|---|---|---|---|
{rows}

Greedy text: {equal} of {prompts} continuations of {new_tokens} tokens are equal. All numbers: conversion.json."""


def model_card(name: str, record: dict[str, Any]) -> str:
    """README.md of a converted model, made from its conversion record alone."""
    return _CARD.format(
        name=name,
        source=record["source"],
        version=record["versions"]["depthroute"],
        scheme=record["residual"]["scheme"],
        options=", ".join(f"`{key}: {value}`" for key, value in record["residual"].items()),
        check=_check(record) if "check" in record else f"Not checked against {record['source']}.",
        **{key: record[key] for key in ("architecture", "parameters", "dtype", "residual_parameters")},
    )


def _check(record: dict[str, Any]) -> str:
    check = record["check"]
    rows = [
        f"| {name.replace('_', ' ')} | {found['largest_absolute']:.3g} | {found['largest_relative']:.3g} "
        f"| {found['same_top_token']:.2%} | {found['loss_original']:.5f} | {found['loss_converted']:.5f} |"
        for name, found in check.items()
        if name in PRECISIONS
    ]
    greedy = {key: check["greedy"][key] for key in ("equal", "prompts", "new_tokens")}
    return _CHECK.format(
        source=record["source"], tokens=check["tokens"], text=check["text"], rows="\n".join(rows), **greedy
    )
