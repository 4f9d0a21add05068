"""A call in a process of its own, which may take too long or break the device without harm to its caller."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def run_apart(seconds: float, call: Callable[..., Any], *arguments: Any) -> Any:
    """What `call` returns, made in a new process, which is ended after `seconds`.

    TimeoutError where it takes longer; RuntimeError where the process dies, or of the text of what `call` raises. Call,
    arguments and result are pickled.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(theirs, call, arguments))
    process.start()
    theirs.close()  # the process has the other end alone, so that its death is seen here
    try:
        if not ours.poll(seconds):
            raise TimeoutError(f"took more than {seconds:g} s")
        found, error = ours.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"its process ended with exit code {process.exitcode}") from None
    finally:
        process.kill()
        process.join()
        ours.close()
    if error is not None:
        raise RuntimeError(error)
    return found


def _send(connection: Connection, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        connection.send((call(*arguments), None))
    except Exception as error:  # of any kind: another package's
        line = (str(error).strip() or "no message").splitlines()[0][:200]
        connection.send((None, f"{type(error).__name__}: {line}"))
