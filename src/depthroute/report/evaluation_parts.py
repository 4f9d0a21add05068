"""The part of a page about one evaluation: scores, differences with their tests, and a figure of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from depthroute.report.drawing import short, styled, wide
from depthroute.report.evaluations import Evaluation, significant
from depthroute.report.plates import Plate, Plates, slug
from depthroute.report.style import BASELINE, INK, PALETTE

_CAPTION = (
    "{candidate} minus {baseline}, with 95 % intervals (paired bootstrap over items). A dot where the difference "
    "is significant at the 5 % level after Holm's correction, a tick where it is not."
)


@dataclass(frozen=True)
class EvaluationPart:
    """What the page shows of one evaluation."""

    anchor: str
    evaluation: Evaluation
    plates: tuple[Plate, ...]


def evaluation_part(evaluation: Evaluation, index: int, plates: Plates) -> EvaluationPart:
    """The part about an evaluation, the `index`-th of the page from 1; its figures are written."""
    return EvaluationPart(f"evaluation-{index}", evaluation, tuple(_plates(evaluation, f"evaluation-{index}", plates)))


def _plates(evaluation: Evaluation, stem: str, plates: Plates) -> Iterator[Plate]:
    for number, comparison in enumerate(evaluation.comparisons, 1):
        caption = _CAPTION.format(**comparison)
        name = f"{stem}-differences-{number}-{slug(comparison['candidate'])}"
        losses = [task for task in comparison["tasks"] if is_loss(task)]
        scores = [task for task in comparison["tasks"] if not is_loss(task)]
        if scores:
            figure = differences(scores, "difference of scores")
            yield plates.add(figure, name, f"{caption} Above zero {comparison['candidate']} is better.")
        if losses:
            figure = differences(losses, "difference of log perplexities (nats)")
            yield plates.add(figure, f"{name}-losses", f"{caption} Below zero {comparison['candidate']} is better.")


def is_loss(task: Mapping[str, Any]) -> bool:
    """Whether less is better: perplexities are compared by their logarithm, and named so."""
    return " log " in task["task"]


@styled
def differences(tasks: Sequence[Mapping[str, Any]], label: str) -> Figure:
    """Differences on tasks from top to bottom, each with its interval."""
    figure, axes = wide(label, "", height=0.8 + 0.3 * len(tasks))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(visible=False, axis="y")
    axes.axvline(0, color=BASELINE, linewidth=1.2)
    for row, task in enumerate(tasks):
        axes.plot([task["low"], task["high"]], [row, row], color=INK, linewidth=1.2)
        mark, size = ("o", 6) if significant(task) else ("|", 9)
        axes.plot(task["difference"], row, mark, color=PALETTE[0], markersize=size, markeredgewidth=1.8)
    axes.set_yticks(range(len(tasks)), [short(task["task"]) for task in tasks])
    axes.set_ylim(len(tasks) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    return figure
