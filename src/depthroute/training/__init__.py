"""Training: strict recipes, Hugging Face's Trainer, and runs that survive a kill at any moment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from depthroute.training.recipe import DataRecipe, Recipe, load_recipe, make_recipe
from depthroute.training.shipped import find_recipe

if TYPE_CHECKING:
    from depthroute.training.trainer import train

__all__ = ["DataRecipe", "Recipe", "find_recipe", "load_recipe", "make_recipe", "train"]


def __getattr__(name: str) -> Any:
    # Only who trains waits for Trainer and accelerate to be imported.
    if name == "train":
        from depthroute.training.trainer import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
