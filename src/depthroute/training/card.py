"""The model card of a trained model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import depthroute
from depthroute.models.card import describe_scheme, model_card
from depthroute.training.recipe import Recipe


def training_card(recipe: Recipe, summary: Mapping[str, Any], residual: Mapping[str, Any], averaged: bool) -> str:
    """README.md of a trained model, from its recipe and the summary of its run.

    `residual`: the scheme's resolved configuration. `averaged`: of the model with the averaged weights.
    """
    start = f"from {_name(recipe.model.checkpoint)}" if recipe.model.checkpoint else "from random weights"
    loss, error = (summary.get(f"final_{'ema_' if averaged else ''}{key}") for key in ("loss", "stderr"))
    facts = [
        f"{summary['parameters']:,} parameters, of which {summary['residual_parameters']:,} are the scheme's",
        describe_scheme(residual),
        f"data: {_name(recipe.data.train)}, {summary['tokens']:,} tokens in {summary['steps']:,} steps, "
        f"sequences of {recipe.data.sequence_length:,} tokens",
    ]
    if loss is not None:
        spread = "" if error is None else f" ± {error:.4f} (over held-out sequences)"
        facts.append(f"held-out loss: {loss:.4f}{spread} nats a token")
    if averaged:
        facts.append(f"weights: their running average over training, decay {recipe.training.ema_decay}")
    return model_card(
        recipe.name,
        f"Trained {start} by depthroute {depthroute.__version__} with the residual scheme `{summary['scheme']}`, seed "
        f"{recipe.seed}.\nThe recipe, all metrics and the environment lie in the folder of the run. The licences of "
        "its data hold.",
        facts,
    )


def _name(source: str | Path | list[Any]) -> str:
    """A name that does not tell where it lay on this machine."""
    if isinstance(source, list):
        return ", ".join(map(_name, source))
    return Path(source).name if Path(str(source)).is_absolute() else str(source)
