"""The end of a message about a key that no recipe has."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from depthroute.residual import option_names

_SHORT = {"lr": "optimizer.learning_rate", "wd": "optimizer.weight_decay", "bs": "training.batch_size"}


def nearest_key(key: str, path: tuple[str, ...], value: Any, sections: Mapping[tuple[str, ...], bool]) -> str:
    """What an unknown `key` of the section `path` was meant to be, by its name and whether its value is a mapping.

    `sections` has every key of a recipe, and whether it is a section. The very name elsewhere comes first, then one
    like it in the same section, then one that is nearly it in another; without any, the keys of the section are listed.
    """
    is_section = isinstance(value, Mapping)
    known = [k for k, section in sections.items() if section or not is_section]
    known += [("residual",)] if is_section else [("residual", name) for name in sorted(option_names())]
    here = [k for k in known if k[:-1] == path]
    for group, cutoff in ((known, 1.0), (here, 0.6), (known, 0.8)):
        if close := difflib.get_close_matches(key, [k[-1] for k in group], n=1, cutoff=cutoff):
            right = dict.fromkeys(".".join(k) for k in group if k[-1] == close[0])
            return f"; did you mean {' or '.join(map(repr, right))}?"
    if key in _SHORT:
        return f"; did you mean {_SHORT[key]!r}?"
    return f"; known here: {', '.join(k[-1] for k in sections if k[:-1] == path)}"
