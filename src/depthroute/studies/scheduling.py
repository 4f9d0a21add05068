"""Keeping every device busy: jobs as processes, one for each slot, and no process left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch

Job = TypeVar("Job")

_POLL_S = 0.2
_GRACE_S = 5.0
_BUSY_GPU_MEMORY_MIB = 1024  # what other processes may hold on a card that still counts as free


@dataclass(frozen=True)
class Slot:
    """A place for one run at a time: its name for people, and the environment that binds a process to it."""

    name: str
    environment: Mapping[str, str] = field(compare=False)


def free_slots(workers: int | None = None) -> list[Slot]:
    """One slot for each free GPU, or without a GPU for each CPU core; `workers` asks for another number of them.

    Free are the GPUs that CUDA_VISIBLE_DEVICES lists, or where it is not set those that nobody uses. Each of them has
    its share of the CPU's cores. A CPU slot runs on one thread, so that a run has the same numbers whatever runs beside
    it.
    Raises ValueError for no workers and for more than there are free GPUs; RuntimeError where every GPU is in use, and
    in one of several processes that torchrun or accelerate has started, since each would run the whole study.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RuntimeError("a study places its runs on the GPUs by itself; start it without torchrun or accelerate")
    if workers is not None and workers < 1:
        raise ValueError(f"workers: got {workers}, wants at least 1")
    if not torch.cuda.is_available():
        return _cpu_slots(workers or _cores())
    slots = _gpu_slots()
    if workers is not None and workers > len(slots):
        raise ValueError(f"workers: got {workers}, wants at most {len(slots)}: one for each free GPU")
    return slots[:workers]


def run_all(
    jobs: Sequence[Job],
    slots: Sequence[Slot],
    start: Callable[[Job, Slot], subprocess.Popen],
    finished: Callable[[Job, int], None],
    tick: Callable[[Mapping[Slot, Job]], None] = lambda running: None,
) -> None:
    """Run every job, in order, as soon as a slot is free for it; returns when all have ended.

    `start(job, slot)` gives its process, which leads its own process group; `finished(job, status)` hears of its end,
    `tick(running)` is called a few times a second. Whatever ends this early (Ctrl-C, SIGTERM, an error) ends every
    process first.
    """
    waiting, running = deque(jobs), dict[Slot, tuple[Job, subprocess.Popen]]()
    with sigterm_as_interrupt():
        try:
            while waiting or running:
                for slot in slots:
                    if waiting and slot not in running:
                        job = waiting.popleft()
                        running[slot] = (job, start(job, slot))
                for slot, (job, process) in list(running.items()):
                    status = process.poll()
                    if status is not None:
                        del running[slot]
                        finished(job, status)
                tick({slot: job for slot, (job, _) in running.items()})
                if running:
                    time.sleep(_POLL_S)
        finally:
            stop([process for _, process in running.values()])


def stop(processes: Sequence[subprocess.Popen]) -> None:
    """End processes, each the leader of its group, with all that they have started."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, sent)
        deadline = time.monotonic() + _GRACE_S
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(0.05)


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM (a batch system's) stops the workers as Ctrl-C does; outside the main thread signals are not ours."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_slots(number: int) -> list[Slot]:
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return [Slot(f"worker {index}", one_thread) for index in range(number)]


def _gpu_slots() -> list[Slot]:
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in listed.split(",")] if listed else _unused_gpus()
    if not names:
        raise RuntimeError("every GPU is in use; CUDA_VISIBLE_DEVICES says which ones to take all the same")
    shared = {"OMP_NUM_THREADS": str(max(1, _cores() // len(names))), "TOKENIZERS_PARALLELISM": "false"}
    return [Slot(f"GPU {name}", {"CUDA_VISIBLE_DEVICES": name, **shared}) for name in names]


def _unused_gpus() -> list[str]:
    query = ["nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits"]
    try:
        rows = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):  # nobody says what is in use
        return [str(index) for index in range(torch.cuda.device_count())]
    fields = [row.split(", ") for row in rows if row.strip()]
    return [uuid for uuid, used in fields if not used.isdecimal() or int(used) < _BUSY_GPU_MEMORY_MIB]
