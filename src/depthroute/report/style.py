"""Colours of the arms: the same in every figure and table, on light and dark pages, for colour-blind readers too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.colors import LinearSegmentedColormap

# Text, axes and grid of the figures. On the page it becomes the text colour of the scheme in force; in the files it
# stays this grey, which is readable on white and on black.
INK = "#77787a"
BASELINE = "#85878a"

# Chosen by search: far apart in CIELAB for normal and for red-, green- and blue-blind sight, the grey among them, and
# with enough contrast to a light and to a dark page.
PALETTE = ("#1483cc", "#e67e17", "#6d39e6", "#805920", "#2db262", "#b22d55", "#993d87")
# Below zero, zero, above zero: the two ends are apart for colour-blind readers, and zero stands out from either page.
DIVERGING = LinearSegmentedColormap.from_list("below-above", ["#b35806", "#e8a04c", "#d9d9d6", "#6aa9d8", "#1b5fa5"])
DASHES: tuple[str | tuple[int, tuple[float, ...]], ...] = ("-", (0, (4, 1.5)), (0, (1.2, 1.2)))


@dataclass(frozen=True)
class Stroke:
    """How one arm is drawn: a colour, and a dash pattern once the colours are used up."""

    colour: str
    dashes: str | tuple[int, tuple[float, ...]] = "-"


def strokes(arms: Sequence[str], baseline: str | None) -> dict[str, Stroke]:
    """The stroke of each arm: grey for the baseline, then the palette in the order of the arms."""
    others = [arm for arm in arms if arm != baseline]
    chosen = {
        arm: Stroke(PALETTE[i % len(PALETTE)], DASHES[i // len(PALETTE) % len(DASHES)]) for i, arm in enumerate(others)
    }
    return {arm: chosen.get(arm, Stroke(BASELINE)) for arm in arms}
