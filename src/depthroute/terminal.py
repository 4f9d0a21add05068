"""What commands print, on a terminal and away from one."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


def show(table: Table, console: Console) -> None:
    """Print a table. Away from a terminal, where nothing bounds a line, its cells stand whole whatever they need."""
    before = console.width
    if not console.is_terminal:
        unbounded = console.options.update(max_width=10_000)
        console.width = max(before, Measurement.get(console, unbounded, table).maximum)
    try:
        console.print(table)
    finally:
        console.width = before
