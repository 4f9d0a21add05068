"""YAML without its surprises: `1e-3` is a number, and a key that stands twice is an error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml


class _StrictLoader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


class _StrictDumper(yaml.SafeDumper):
    """Quotes what the loader would take for a number."""


# YAML 1.1, as PyYAML reads it, wants a dot and a sign of the exponent: 1e-3 would be text.
for _each in (_StrictLoader, _StrictDumper):
    _each.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(?:\d[\d_]*(?:\.[\d_]*)?|\.\d[\d_]*)[eE][-+]?\d+$"),
        list("-+.0123456789"),
    )


def text_of(values: Any) -> str:
    """The values as YAML, which `parse` reads as they were."""
    return yaml.dump(values, Dumper=_StrictDumper, sort_keys=False, allow_unicode=True)


def parse(text: str, where: str) -> Any:
    """The value that a YAML text describes. ValueError in one line, which begins with `where`, if it is no YAML."""
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise ValueError(f"{where}{line}: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{where}: {' '.join(str(error).split())}") from None


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. FileNotFoundError, or ValueError if it holds anything else."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text file in UTF-8") from None
    values = parse(text, str(path))
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds {type(values).__name__}, wanted a mapping of keys to values")
    return values
