"""Does a JSON file hold what a report is about to show? Shapes are written as examples of what is wanted."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

NUMBER, OPTIONAL_NUMBER, TEXT, WHOLE = "a finite number", "a finite number or null", "a text", "a whole number"

_KINDS = {
    dict: "an object",
    list: "a list",
    str: "a text",
    bool: "true or false",
    int: "a number",
    float: "another number",
    type(None): "null",
}


def mismatch(value: Any, shape: Any, place: str = "") -> str | None:
    """The first place where `value` differs from `shape`, in words; None where there is none.

    A shape is NUMBER, OPTIONAL_NUMBER, TEXT or WHOLE, a mapping of the keys that must be there to their shapes, a list
    with the shape of every item, or None for null.
    """
    if shape is None:
        return None if value is None else _say(place, value, "null")
    if isinstance(shape, Mapping):
        if not isinstance(value, Mapping):
            return _say(place, value, "an object")
        for key, inner in shape.items():
            where = f"{place}.{key}".lstrip(".")
            if key not in value:
                return f"{where} is missing"
            if found := mismatch(value[key], inner, where):
                return found
        return None
    if isinstance(shape, list):
        if not isinstance(value, list):
            return _say(place, value, "a list")
        faults = (mismatch(item, shape[0], f"{place}[{i}]") for i, item in enumerate(value))
        return next(filter(None, faults), None)
    return None if _fits(value, shape) else _say(place, value, shape)


def _fits(value: Any, shape: str) -> bool:
    if shape == TEXT:
        return isinstance(value, str)
    if value is None:
        return shape == OPTIONAL_NUMBER
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole or (shape != WHOLE and isinstance(value, float) and isfinite(value))


def _say(place: str, value: Any, wanted: str) -> str:
    return f"{place or 'the file'} is {_KINDS[type(value)]}; wanted {wanted}"
