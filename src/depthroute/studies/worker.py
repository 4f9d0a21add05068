"""One run of a study in a process of its own: `python -P worker.py RECIPE RUN_FOLDER`.

The study that starts it holds the other end of its standard input and never writes there. When that end closes, the
study is gone, however it ended, and the worker ends with all its children: a killed study leaves no orphans. Its log
(standard output) is locked while it runs, so that two studies on one folder never train the same run at once. It is
started as a file, so that both hold before the seconds that importing the package takes.
"""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import sys
import threading
import time
from pathlib import Path

BUSY = 75  # exit status: another process holds this run (EX_TEMPFAIL of sysexits)
_PATIENCE_S = 10.0  # a worker of a study that was just killed may need a moment to end


def command(recipe: Path, out: Path) -> list[str]:
    """The command that trains a recipe file into a run folder; its standard input must be a pipe that stays open."""
    # -P keeps this folder off the module path, where our statistics.py would hide the library's.
    return [sys.executable, "-P", __file__, str(recipe), str(out)]


def main(arguments: list[str]) -> int:
    """Train the recipe into the folder; returns the exit status."""
    recipe, out = map(Path, arguments)
    threading.Thread(target=_end_with_study, daemon=True).start()
    if not _lock_log():
        print(f"{out} is being trained by another process")
        return BUSY
    from depthroute.training import train
    from depthroute.training.recipe import load_recipe

    train(load_recipe(recipe), out)
    return 0


def _end_with_study() -> None:
    os.read(sys.stdin.fileno(), 1)  # not sys.stdin.read: the lock of a buffer would abort the interpreter at its end
    # The worker leads a process group of its own, with its data loaders in it.
    os.killpg(os.getpgid(0), signal.SIGKILL)


def _lock_log() -> bool:
    log = sys.stdout.fileno()
    if not stat.S_ISREG(os.fstat(log).st_mode):
        return True
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
