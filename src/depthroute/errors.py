"""Words for error messages."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest right one where one is near, and all that are known."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{hint} (known: {', '.join(known)})"


def in_one_line(command: Callable[[], object]) -> None:
    """Run a command. An error is one line and exit code 1; DEPTHROUTE_DEBUG=1 shows where it came from."""
    try:
        command()
    except (ValueError, TypeError, RuntimeError, OSError, ImportError) as error:
        if os.environ.get("DEPTHROUTE_DEBUG"):
            raise
        print(f"depthroute: error: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        sys.exit(1)
