"""What a run ran on: code, versions, devices."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import depthroute

_PACKAGES = ("torch", "transformers", "accelerate", "triton", "tokenizers", "datasets", "safetensors", "numpy")


def describe_environment() -> dict[str, Any]:
    """Everything needed to tell two environments apart, ready for JSON."""
    commit, dirty = _commit()
    return {
        "depthroute": depthroute.__version__,
        "commit": commit,
        "dirty": dirty,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "cuda": torch.version.cuda,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or [_processor()],
        "threads": torch.get_num_threads(),
    }


def describe_code_and_device() -> dict[str, Any]:
    """The same without the command, which tells where things lay on this machine: for files that go with a model."""
    return {key: value for key, value in describe_environment().items() if key not in ("command", "threads")}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> tuple[str | None, bool | None]:
    """The commit of the checkout that the package lies in, and whether it has changes.

    A package that lies in none has the commit that DEPTHROUTE_COMMIT names: a copy of a checkout on another machine.
    """
    here = Path(__file__).resolve()
    # An installed package may lie inside the checkout of something else, which does not track it.
    if _git("ls-files", "--error-unmatch", here.name, folder=here.parent) is None:
        return os.environ.get("DEPTHROUTE_COMMIT"), None
    commit = _git("rev-parse", "HEAD", folder=here.parent)
    changes = _git("status", "--porcelain", "--untracked-files=no", folder=here.parent)
    return commit, None if changes is None else bool(changes)


def _git(*arguments: str, folder: Path) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
