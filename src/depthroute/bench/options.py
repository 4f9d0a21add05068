"""Types of the benchmarks' options: a senseless value is refused, by the option's name, before anything is built."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from typing import Any

from depthroute.bench.arm import parse_value


def count(text: str) -> int:
    """A whole number of at least one."""
    return _whole(text, least=1)


def count_or_none(text: str) -> int:
    """A whole number of at least zero."""
    return _whole(text, least=0)


def positive(text: str) -> float:
    """A finite number above zero."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise ArgumentTypeError(f"got {text!r}, wants a number > 0")
    return number


def field(text: str) -> tuple[str, Any]:
    """FIELD=VALUE as a name and a value."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ArgumentTypeError(f"got {text!r}, wants FIELD=VALUE")
    return name, parse_value(value)


def _whole(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise ArgumentTypeError(f"got {text!r}, wants a whole number >= {least}")
    return number
