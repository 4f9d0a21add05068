"""One run of a study in a process of its own: `python -P worker.py RECIPE RUN_FOLDER [TEXT ...]`.

With texts (sources of `depthroute.data.documents`) the trained model is probed on them, where its scheme reads over
depth, before the process ends.

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
from collections.abc import Sequence
from pathlib import Path

BUSY = 75  # exit status: another process holds this run (EX_TEMPFAIL of sysexits)
PROBED_TOKENS = 2**17
_PATIENCE_S = 10.0  # a worker of a study that was just killed may need a moment to end


def command(recipe: Path, out: Path, probe: Sequence[str] = ()) -> list[str]:
    """The command that trains a recipe file into a run folder; its standard input must be a pipe that stays open.

    `probe`: the texts on which the model is probed in the end.
    """
    # -P keeps this folder off the module path, where our statistics.py would hide the library's.
    return [sys.executable, "-P", __file__, str(recipe), str(out), *probe]


def main(arguments: list[str]) -> int:
    """Train the recipe into the folder, probe what came out where there are texts; returns the exit status."""
    recipe, out = map(Path, arguments[:2])
    texts = arguments[2:]
    threading.Thread(target=_end_with_study, daemon=True).start()
    if not _lock_log():
        print(f"{out} is being trained by another process")
        return BUSY
    from depthroute.training import train
    from depthroute.training.recipe import load_recipe

    train(load_recipe(recipe), out)
    if texts and (out / "read_weights.json").is_file():  # so its scheme reads over depth
        from depthroute.probing import probe_folder

        probe_folder(out, text=texts, tokens=PROBED_TOKENS)
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
