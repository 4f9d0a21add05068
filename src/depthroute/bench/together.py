"""Arms of a benchmark in processes of their own, which compile at the same time and take turns on the device."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

Make = Callable[[Any], tuple[Any, Any]]


class Together:
    """All arms, ready; RuntimeError with an arm's own error if it fails, whose traceback goes to standard error.

    A context manager: at its end every process has ended.

    Args:
        make: of a job the arm, and what to tell of it, which `rows` has for each. Both are pickled.
        jobs: one for each process.
    """

    def __init__(self, make: Make, jobs: Sequence[Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self._jobs, self._processes, self._ends = jobs, [], []
        for job in jobs:
            ours, theirs = context.Pipe()
            self._processes.append(context.Process(target=_serve, args=(theirs, make, job), daemon=True))
            self._processes[-1].start()
            theirs.close()  # so that its end is heard of here
            self._ends.append(ours)
        self.rows: list[Any] = []

    def __enter__(self) -> Together:
        try:
            self.rows = [self._answer(i) for i in range(len(self._ends))]
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def ask(self, i: int, method: str, *arguments: Any) -> Any:
        """What a method of arm i gives."""
        self._ends[i].send((method, arguments))
        return self._answer(i)

    def _answer(self, i: int) -> Any:
        try:
            worked, answer = self._ends[i].recv()
        except EOFError:
            raise RuntimeError(f"the process of arm {i}, {self._jobs[i]}, has ended without a word") from None
        if not worked:
            raise RuntimeError(f"arm {i}, {self._jobs[i]}, has failed: {answer}")
        return answer

    def _end(self) -> None:
        for process in self._processes:
            process.terminate()
            process.join()


def _serve(end: Connection, make: Make, job: Any) -> None:
    try:
        arm, row = make(job)
        end.send((True, row))
        while True:
            method, arguments = end.recv()
            end.send((True, getattr(arm, method)(*arguments)))
    except EOFError:
        return  # nobody asks any more
    except Exception as error:
        traceback.print_exc()
        end.send((False, "".join(traceback.format_exception_only(error)).strip()))
