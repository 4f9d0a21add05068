"""The readings of a probe in a short table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from depthroute.probing.disagreement import ARRANGEMENTS
from depthroute.terminal import show

_MOST_READ = 3  # sources


@dataclass(frozen=True)
class Row:
    """One reading: of the trained queries, and where it has one, of random queries of the same norm."""

    label: str
    trained: float | None
    null: float | None = None
    null_sd: float | None = None
    excess: float | None = None

    def cells(self) -> tuple[str, str, str]:
        """Trained, null and excess in three decimals."""
        spread = "" if self.null_sd is None else f" ± {self.null_sd:.3f}"
        null = "" if self.null is None else f"{self.null:.3f}{spread}"
        trained = "\N{EN DASH}" if self.trained is None else f"{self.trained:.3f}"
        return trained, null, "" if self.excess is None else f"{self.excess:+.3f}"


def print_probe(result: Mapping[str, Any], console: Console | None = None) -> None:
    """Prints a short table of what `probe_folder` found."""
    title = f"{result['model']}: {result['tokens']:,} tokens of {result['text']}"
    table = Table(title=escape(title), title_justify="left")
    table.add_column("reading", overflow="fold")  # on a narrow terminal: cut labels would look alike
    for name in ("trained", "random queries", "excess"):
        table.add_column(name, justify="right")
    for row in probe_rows(result):
        table.add_row(row.label, *row.cells())
    show(table, console or Console())


def probe_rows(result: Mapping[str, Any]) -> Iterator[Row]:
    """The readings that sum a probe up, from what `probe_folder` returns or its file holds."""
    found, heads = result["disagreement"], result["heads"]
    if found is not None:
        for arrangement in ARRANGEMENTS:
            label = f"KL of {found['slices']} slices, {arrangement.replace('_', ' ')}"
            yield _beside_null(label, found[arrangement], "kl")
    if heads["deviation"] is not None:
        yield from _deviation_rows(heads["deviation"])
    yield Row("cosine of two sources", result["collinearity"]["cosine"])
    yield Row("entropy of a read (even: 1)", heads["relative_entropy"])
    for source in sorted(heads["sources"], key=lambda source: -source["relative_weight"])[:_MOST_READ]:
        yield Row(f"weight on {source['source']} (even: 1)", source["relative_weight"])


def _deviation_rows(deviation: Mapping[str, Any]) -> Iterator[Row]:
    split, between = deviation["split_half"], deviation["between_heads"]
    yield _beside_null("largest deviation of a head", deviation["largest"], "largest")
    yield Row("its correlation on other text", split["r"], split["null"])
    yield Row(f"correlation of heads (by chance {between['by_centring']:.2f})", between["r"], between["null"])


def _beside_null(label: str, reading: Mapping[str, Any], key: str) -> Row:
    return Row(label, reading[key], reading["null"], reading["null_sd"], reading["excess"])
