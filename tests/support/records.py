"""The scripts of the records, which are no package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

RECORDS = Path(__file__).resolve().parents[2] / "records"


def record(name: str, script: str = "write_readme") -> ModuleType:
    """A script of the record whose folder ends with `name`, imported anew."""
    (folder,) = RECORDS.glob(f"*_{name}")
    spec = importlib.util.spec_from_file_location(f"{name}_{script}".replace("-", "_"), folder / f"{script}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
