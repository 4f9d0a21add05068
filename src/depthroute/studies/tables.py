"""The tables of a study for people: losses with their spread, paired differences, best rates, gains in compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from depthroute.studies.study import Study


def tables(study: Study, comparisons: Mapping[str, Any]) -> Iterator[Table]:
    """Every table that a study has something to say in."""
    yield comparison_table(study, comparisons)
    if comparisons["best_learning_rates"]:
        yield rate_table(comparisons)
    if "compute_gain" in comparisons:
        yield gain_table(comparisons["compute_gain"])


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


def rate_table(comparisons: Mapping[str, Any]) -> Table:
    """Every arm at its own best learning rate, with the paired difference to the baseline at the baseline's best."""
    table = Table(title="best learning rates", caption="* the lowest or highest rate tried: the best may lie outside")
    for name in ("arm", "point", "rate", "loss", "best minus best", "p"):
        table.add_column(name, justify="left" if name in ("arm", "point") else "right")
    for row in comparisons["best_learning_rates"]:
        difference = row["difference"]
        table.add_row(
            row["arm"],
            ", ".join(f"{axis}={value}" for axis, value in row["point"].items()),
            f"{row['learning_rate']:g}{'*' if row['at_edge'] else ''}",
            f"{row['mean']:.4f}",
            _with_error(difference, "standard_error", "+") if difference else "-",
            f"{difference['p']:.3f}" if difference and difference["p"] is not None else "-",
        )
    return table


def gain_table(gains: Mapping[str, Any]) -> Table:
    """The compute-equivalent gains of `gains.compute_gains`, with their fit."""
    notes = [f"Fit through the baseline: {gains['fit']}" if gains["fit"] else "No fit", gains["warning"]]
    table = Table(title="compute-equivalent gains", caption="\n".join(filter(None, notes)), caption_justify="left")
    for name in ("arm", "routing FLOPs", "gain"):
        table.add_column(name, justify="left" if name == "arm" else "right")
    for row in gains["gains"]:
        table.add_row(row["label"], f"{row['routing_share']:.2%}", f"{row['gain']:.2f}x")
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
