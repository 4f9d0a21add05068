"""The card of a trained model."""

from __future__ import annotations

import json

from support.small_runs import small_recipe


def test_a_trained_model_has_a_card(finished):
    card = (finished / "final" / "README.md").read_text(encoding="utf-8")
    summary = json.loads((finished / "summary.json").read_text(encoding="utf-8"))
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "# small\n" in card
    assert f"{summary['parameters']:,} parameters" in card
    assert f"held-out loss: {summary['final_loss']:.4f}" in card
    assert str(finished) not in card


def test_the_averaged_model_says_so(corpus, finished):
    from depthroute.training.card import training_card

    recipe = small_recipe(corpus, "training.ema_decay=0.9")
    summary = {**json.loads((finished / "summary.json").read_text()), "final_ema_loss": 3.25}
    card = training_card(recipe, summary, recipe.residual, averaged=True)
    assert "held-out loss: 3.2500" in card
    assert "running average over training, decay 0.9" in card
    assert str(corpus) not in card
