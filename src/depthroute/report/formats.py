"""How numbers are written in a report."""

from __future__ import annotations

ABSENT = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"


def loss(value: float | None) -> str:
    """Nats per token, four decimals."""
    return ABSENT if value is None else f"{value:.4f}".replace("-", MINUS)


def signed(value: float | None) -> str:
    """A difference of losses, with its sign."""
    return ABSENT if value is None else f"{value:+.4f}".replace("-", MINUS)


def decimals(value: float | None, places: int = 3, signed: bool = False) -> str:
    """A number with a fixed number of decimals; of a tiny one no zeros with a minus."""
    if value is None:
        return ABSENT
    text = f"{value:{'+' if signed else ''}.{places}f}"
    return text.replace("-", MINUS) if float(text) else text.replace("-", "+" if signed else "")


def score(value: float | None) -> str:
    """A score: four decimals, fewer of large ones, which are perplexities."""
    if value is None:
        return ABSENT
    return decimals(value, 4 if abs(value) < 100 else 2) if abs(value) < 10_000 else count(value)


def count(value: float | None) -> str:
    """A whole number with thousands apart."""
    return ABSENT if value is None else f"{value:,.0f}"


def amount(value: float | None) -> str:
    """A large number in three digits: 12.3 M."""
    if value is None:
        return ABSENT
    return _scaled(value, 1000.0, ("", " K", " M", " B", " T"))


def memory(value: float | None) -> str:
    """Bytes as MB or GB (powers of ten)."""
    if value is None:
        return ABSENT
    return _scaled(value, 1000.0, (" B", " kB", " MB", " GB", " TB"))


def p_value(value: float) -> str:
    """A p-value with its sign of relation: p = 0.013, p < 0.0001."""
    return "p < 0.0001" if value < 1e-4 else f"p = {value:.2g}"


def p_alone(value: float | None) -> str:
    """A p-value in a column of its own: 0.013, 0.0004, < 0.0001."""
    if value is None:
        return ABSENT
    return "< 0.0001" if value < 1e-4 else f"{value:.4f}" if value < 1e-3 else f"{value:.3f}"


def duration(seconds: float | None) -> str:
    """Seconds as 45 s, 12 min or 3.4 h."""
    if seconds is None:
        return ABSENT
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def unbroken(text: str) -> str:
    """The text with what belongs together kept on one line: 3.1 ± 0.2, p = 0.03."""
    text = text.replace(" %", "\N{NO-BREAK SPACE}%")
    for sign in ("±", "=", "<"):
        text = text.replace(f" {sign} ", f"\N{NO-BREAK SPACE}{sign}\N{NO-BREAK SPACE}")
    return text


def _scaled(value: float, base: float, units: tuple[str, ...]) -> str:
    unit = 0
    while abs(value) >= base * 0.9995 and unit < len(units) - 1:
        value, unit = value / base, unit + 1
    digits = 0 if unit == 0 or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f}{units[unit]}"
