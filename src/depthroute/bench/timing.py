"""Clocks, memory and bandwidth of one CUDA device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

WARM_UP = 3
AHEAD = 4_000_000  # clock ticks, 2 ms: by then the host has launched the first replays


class Times(NamedTuple):
    """Milliseconds of one call over repeats."""

    median: float
    least: float
    most: float

    @staticmethod
    def of(samples: list[float]) -> Times:
        return Times(statistics.median(samples), min(samples), max(samples))


def require_cuda() -> None:
    """Raise RuntimeError where there is nothing to measure."""
    if not torch.cuda.is_available():
        raise RuntimeError("a benchmark needs a CUDA device, and torch sees none")


def eager_times(call: Callable[[], Any], repeats: int = 7) -> Times:
    """Launched from Python each time; ends when the device is done."""
    for _ in range(WARM_UP):
        call()
    torch.cuda.synchronize()
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) * 1e3)
    return Times.of(samples)


def graph_times(call: Callable[[], Any], repeats: int = 7, replays: int = 5) -> Times:
    """Captured once as a CUDA graph; each sample is the mean of `replays` replays.

    They stand in line behind a kernel that only waits, so that the time is the device's: launching a graph of hundreds
    of kernels takes the host long enough to show in the first replay.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    samples = []
    for repeat in range(repeats + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(AHEAD)
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        if repeat:  # the first one warms up
            samples.append(start.elapsed_time(end) / replays)
    del graph
    return Times.of(samples)


def peak_memory(call: Callable[[], Any]) -> int:
    """Bytes that one call needs beyond what is allocated before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def copy_bandwidth(num_bytes: int = 2**31) -> float:
    """Bytes read and written in a second by an elementwise kernel: `copy_` of a whole buffer would run none."""
    source = torch.zeros(num_bytes // 4, device="cuda")
    target = torch.empty_like(source)
    milliseconds = graph_times(lambda: torch.neg(source, out=target)).median
    return 2 * num_bytes / milliseconds * 1e3


def environment() -> dict[str, Any]:
    """The card and the versions that a number belongs to."""
    import triton

    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
    }
