"""The scores of a model in its card: a table for people, and the hub's `model-index` for machines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard

from depthroute.evaluation.scores import SCORE_HEAD, notes, score_rows, table
from depthroute.files import write_text
from depthroute.models.card import CARD, card_of_folder, with_section

SECTION = "Evaluation"


def write_evaluation(folder: Path, model: Mapping[str, Any]) -> bool:
    """Put the scores of one model of evaluation.json into its card, in the place of earlier ones.

    Only into cards of this project's models: those of others are not ours to write. Returns whether it was one.
    """
    if json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type") != "depthroute":
        return False
    lines = "".join(f"- {note}\n" for note in notes(model))
    text = with_section(card_of_folder(folder), SECTION, f"{table(SCORE_HEAD, score_rows(model))}\n{lines}")
    card: Any = ModelCard(text)
    results = _results(model)
    card.data.model_name, card.data.eval_results = (model["settings"]["name"], results) if results else (None, None)
    write_text(folder / CARD, str(card))
    return True


def _results(model: Mapping[str, Any]) -> list[EvalResult]:
    """The scores as the hub knows them. A part of a task is no score of that task, nor is nan; both are left out."""
    if model["settings"]["limit"] is not None:
        return []
    return [
        EvalResult("text-generation", task, task, metric, float(value), verified=False)
        for task, _, _, metric, value, _ in score_rows(model)
        if isfinite(float(value))
    ]
