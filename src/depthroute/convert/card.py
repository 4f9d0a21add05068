"""The model card of a converted model."""

from __future__ import annotations

from typing import Any

from depthroute.convert.check import PRECISIONS
from depthroute.models.card import describe_scheme, model_card

# How near the original a converted model starts: `starts` of the record, in words.
STARTS = {
    "exact": "starts as the original, bit for bit",
    "up_to_rounding": "starts as the original, up to rounding",
    "up_to_eps": "does not start exactly as the original: the eps of the norms stays "
    "(mhar or block_mhar with read_scale sum starts equal up to rounding, delta_mhar bit for bit)",
    "not": "does not promise to start as the original (delta_mhar does, bit for bit)",
}

_CHECK = """\
Beside {source}, on {tokens} tokens of {text}:

| precision | largest logit deviation | relative | same top token | loss before | loss after |
|---|---|---|---|---|---|
{rows}

Greedy text: {equal} of {prompts} continuations of {new_tokens} tokens are equal. All numbers: conversion.json."""


def conversion_card(name: str, record: dict[str, Any]) -> str:
    """README.md of a converted model, made from its conversion record alone."""
    source, residual = record["source"], record["residual"]
    return model_card(
        name,
        f"{source}, converted by depthroute {record['versions']['depthroute']} with the residual scheme\n"
        f"`{residual['scheme']}`. It has been trained no further: what it computes is what the table says. "
        f"The licence of {source} holds.",
        [
            f"decoder: {record['architecture']}, {record['parameters']:,} parameters in {record['dtype']}, "
            f"of which {record['residual_parameters']:,} are the scheme's",
            describe_scheme(residual),
            STARTS[record["starts"]],
        ],
        _check(record) if "check" in record else f"Not checked against {source}.",
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
