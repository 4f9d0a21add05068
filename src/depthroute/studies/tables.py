"""The table of a study for people: losses with their spread, paired differences, and what a number is measured by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from depthroute.studies.study import Study


def comparison_table(study: Study, comparisons: Mapping[str, Any]) -> Table:
    """One row for each arm (at each point of the grid), from what `comparisons.compare` gives.

    Losses are tail means in nats for each held-out token: mean +- standard deviation over seeds. A difference is arm
    minus baseline, seed by seed: mean +- standard error. The last row is the unigram entropy of the held-out text.
    """
    table = Table(title=study.name, caption=_caption(study, comparisons), caption_justify="left")
    table.add_column("arm")
    for name in ("seeds", "held-out loss", f"minus {study.baseline}", "p", "tokens/s"):
        table.add_column(name, justify="right")
    arms = comparisons["arms"]
    for arm in arms:
        loss, difference, speed = arm["loss"], arm["difference"], arm["tokens_per_second"]
        table.add_row(
            arm["label"],
            str(loss["n"]) if loss else "0",
            _with_error(loss, "standard_deviation") if loss else "-",
            _with_error(difference, "standard_error", "+") if difference else "-",
            f"{difference['p']:.3f}" if difference and difference["p"] is not None else "-",
            f"{speed:,.0f}" if speed else "-",
        )
    entropies = {arm["unigram_entropy"] for arm in arms} - {None}
    if len(entropies) == 1:
        table.add_section()
        table.add_row("unigram entropy", "", f"{entropies.pop():.4f}", "", "", "", style="dim")
    return table


def _with_error(summary: Mapping[str, Any], error: str, sign: str = "") -> str:
    spread = "" if summary[error] is None else f" ± {summary[error]:.4f}"
    return f"{summary['mean']:{sign}.4f}{spread}"


def _caption(study: Study, comparisons: Mapping[str, Any]) -> str:
    text = (
        "Loss: nats for each held-out token, mean ± standard deviation over seeds. "
        f"Difference to {study.baseline}: paired by seed, mean ± standard error; p of a two-sided paired t-test."
    )
    pairs = [arm["difference"]["n"] for arm in comparisons["arms"] if arm["difference"]]
    if pairs and min(pairs) < 3:
        text += " With one or two seeds read the sign and the size of a difference, not its p."
    return text
