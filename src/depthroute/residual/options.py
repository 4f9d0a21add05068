"""Checks of the options of a scheme: clear errors in place of silent defaults."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from depthroute.errors import nearest


def build_options(options_class: type, values: dict[str, Any], scheme: str) -> Any:
    """An instance of a scheme's `Options` from the entries of a configuration; ValueError names an unknown key."""
    known = [field.name for field in fields(options_class)]
    for key in values:
        if key not in known:
            raise ValueError(f"residual: unknown key {key!r} for scheme {scheme!r}{nearest(key, [*known, 'scheme'])}")
    return options_class(**values)


def check_count(name: str, value: Any, *, also: tuple[str, ...] = ()) -> None:
    """A whole number of at least one, or one of the words `also`."""
    if isinstance(value, str) and value in also:
        return
    wanted = " or ".join(["a whole number >= 1", *map(repr, also)])
    if isinstance(value, bool) or not isinstance(value, int):
        error = ValueError if isinstance(value, str) else TypeError
        raise error(f"residual.{name} is {value!r}, but must be {wanted}")
    if value < 1:
        raise ValueError(f"residual.{name} is {value!r}, but must be {wanted}")


def check_number(name: str, value: Any, *, above: float) -> None:
    """A finite number greater than `above`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"residual.{name} is {value!r}, but must be a number > {above}")
    if not math.isfinite(value) or value <= above:
        raise ValueError(f"residual.{name} is {value!r}, but must be a number > {above}")


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """One of `choices`."""
    if value not in choices:
        raise ValueError(f"residual.{name} is {value!r}, but must be one of {', '.join(map(repr, choices))}")


def check_flag(name: str, value: Any) -> None:
    """True or false."""
    if not isinstance(value, bool):
        raise TypeError(f"residual.{name} is {value!r}, but must be true or false")


def route_heads(num_heads: int | str, decoder: Any) -> int:
    """H for this decoder: `num_heads`, or the number of its KV heads for "kv". ValueError where H does not divide D."""
    heads = int(decoder.num_key_value_heads if num_heads == "kv" else num_heads)
    if decoder.hidden_size % heads:
        raise ValueError(
            f"residual.num_heads is {num_heads!r} (H = {heads}), but must divide hidden_size {decoder.hidden_size}"
        )
    return heads
