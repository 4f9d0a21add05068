"""The tables of a study for people: losses with their spread, paired differences, best rates, gains in compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from depthroute.studies.study import Study, label


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
    arms = comparisons["arms"]
    numbers = {arm["loss"]["n"] for arm in arms if arm["loss"]}
    columns = ["arm", "seeds", "held-out loss", f"minus {study.baseline}", "p", "tokens/s"]
    if len(numbers) == 1:
        columns.remove("seeds")
    table = _table(study.name, columns, _caption(study, comparisons, numbers))
    for arm in arms:
        loss, difference, speed = arm["loss"], arm["difference"], arm["tokens_per_second"]
        cells = {
            "arm": arm["label"],
            "seeds": str(loss["n"]) if loss else "0",
            "held-out loss": _with_error(loss, "standard_deviation") if loss else "-",
            f"minus {study.baseline}": _with_error(difference, "standard_error", "+") if difference else "-",
            "p": _p(difference),
            "tokens/s": f"{speed:,.0f}" if speed else "-",
        }
        table.add_row(*(cells[name] for name in columns))
    entropies = {arm["unigram_entropy"] for arm in arms} - {None}
    if len(entropies) == 1:
        cells = dict.fromkeys(columns, "") | {"arm": "unigram entropy", "held-out loss": f"{entropies.pop():.3f}"}
        table.add_section()
        table.add_row(*cells.values())
    return table


def rate_table(comparisons: Mapping[str, Any]) -> Table:
    """Every arm at its own best learning rate, with the paired difference to the baseline at the baseline's best."""
    note = "* the lowest or highest rate tried: the best may lie outside"
    table = _table("best learning rates", ["arm", "rate", "held-out loss", "best minus best", "p"], note)
    for row in comparisons["best_learning_rates"]:
        difference = row["difference"]
        table.add_row(
            label(row["arm"], row["point"]),
            f"{row['learning_rate']:g}{'*' if row['at_edge'] else ''}",
            f"{row['mean']:.3f}",
            _with_error(difference, "standard_error", "+") if difference else "-",
            _p(difference),
        )
    return table


def gain_table(gains: Mapping[str, Any]) -> Table:
    """The compute-equivalent gains of `gains.compute_gains`, with their fit."""
    notes = [f"Fit through the baseline: {gains['fit']}" if gains["fit"] else "No fit", gains["warning"]]
    table = _table("compute-equivalent gains", ["arm", "routing FLOPs", "gain"], "\n".join(filter(None, notes)))
    for row in gains["gains"]:
        table.add_row(row["label"], f"{row['routing_share']:.2%}", f"{row['gain']:.2f}x")
    return table


def _table(title: str, columns: Sequence[str], caption: str) -> Table:
    table = Table(title=escape(title), caption=escape(caption), caption_justify="left", box=box.SIMPLE_HEAD)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    return table


def _with_error(summary: Mapping[str, Any], error: str, sign: str = "") -> str:
    spread = "" if summary[error] is None else f" ± {summary[error]:.3f}"
    return f"{summary['mean']:{sign}.3f}{spread}"


def _p(difference: Mapping[str, Any] | None) -> str:
    return f"{difference['p']:.3f}" if difference and difference["p"] is not None else "-"


def _caption(study: Study, comparisons: Mapping[str, Any], numbers: set[int]) -> str:
    seeds = f"{min(numbers)} seed{'s' if min(numbers) > 1 else ''} each. " if len(numbers) == 1 else ""
    text = (
        f"{seeds}Loss: nats for each held-out token, mean ± standard deviation over seeds. "
        f"Difference to {study.baseline}: paired by seed, mean ± standard error; p of a two-sided paired t-test."
    )
    pairs = [arm["difference"]["n"] for arm in comparisons["arms"] if arm["difference"]]
    if pairs and min(pairs) < 3:
        text += " With one or two seeds read the sign and the size of a difference, not its p."
    return text
