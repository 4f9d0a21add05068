"""Words for error messages."""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest right one where one is near, and all that are known."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{hint} (known: {', '.join(known)})"


def nearest_path(path: str | Path, *names: str) -> str:
    """The end of a message about a path that is not there: the nearest one that is, or the nearest of some `names`."""
    path = Path(path).expanduser()
    missing = next((part for part in (*reversed(path.parents), path) if not part.exists()), None)
    if missing is None:
        return ""
    known = {name: name for name in names if missing == path}
    with contextlib.suppress(OSError):  # a folder that cannot be listed, or is none
        known |= {found.name: str(missing.with_name(found.name)) for found in missing.parent.iterdir()}
    close = difflib.get_close_matches(missing.name, known, n=1)
    return f"; did you mean {known[close[0]]!r}?" if close else ""


def in_one_line(command: Callable[[], object]) -> None:
    """Run a command. An error is one line and exit code 1; DEPTHROUTE_DEBUG=1 shows where it came from."""
    try:
        command()
    except (ValueError, TypeError, RuntimeError, OSError, ImportError) as error:
        if os.environ.get("DEPTHROUTE_DEBUG"):
            raise
        print(f"depthroute: error: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        sys.exit(1)
