"""Time, throughput and memory of the training itself, on every device, without evaluation and saving."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


class Meter:
    """A clock for training: what happens inside `paused` does not count."""

    def __init__(self, ranks: int = 1) -> None:
        self._peak = 0
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()  # of what this process did before
        self._ranks = ranks
        self.devices: list[dict[str, float]] = []  # by rank, where there are several
        self.start()

    def start(self, tokens: int = 0, seconds: float = 0.0) -> None:
        """Count from now on, on top of what an interrupted run had reached."""
        self._seconds, self._since = seconds, time.perf_counter()
        self._last = (tokens, seconds)

    def read(self, tokens: int) -> dict[str, float]:
        """Where a run stands that has trained on `tokens` tokens; its throughput is the one since the last reading.

        Of several ranks, which all take part, the memory is that of the one that needs most; `devices` then says for
        each of them the throughput of its share by its own clock, and its memory.
        """
        seconds = self._elapsed()
        tokens_before, seconds_before = self._last
        self._last = (tokens, seconds)
        speed, memory = (tokens - tokens_before) / (seconds - seconds_before), self.peak_memory()
        if self._ranks > 1:
            own = {"tokens_per_second": speed / self._ranks, "peak_memory_bytes": memory}
            everyone: list[Any] = [None] * self._ranks
            dist.all_gather_object(everyone, own)
            self.devices = everyone
            memory = max(each["peak_memory_bytes"] for each in everyone)
        return {"tokens": tokens, "tokens_per_second": speed, "peak_memory_bytes": memory, "seconds": seconds}

    def peak_memory(self) -> int:
        """The most that the device's allocator held; without a GPU, the most that the process held."""
        if torch.cuda.is_available():
            return max(self._peak, torch.cuda.max_memory_allocated())
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For evaluation and saving."""
        synchronize()  # what the device still works on belongs to the training
        self._seconds, self._peak = self._elapsed(), self.peak_memory()
        try:
            yield
        finally:
            synchronize()
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            self._since = time.perf_counter()

    def _elapsed(self) -> float:
        return self._seconds + time.perf_counter() - self._since


def synchronize() -> None:
    """Wait for the accelerator, where there is one."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
