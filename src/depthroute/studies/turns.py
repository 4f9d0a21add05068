"""Keeping a device busy while the next runs compile: in each slot one run trains, and others are started ahead of it.

A compiled run spends a minute or more on the host before its first step. A run that has made that step before its turn
is stopped there, and goes on when the one before it has ended: so runs compile side by side and train one after the
other. What a stopped run holds of the device's memory it keeps. One that has trained (and is probed, say) holds up
nobody.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic

from depthroute.studies.scheduling import Job, Slot, sigterm_as_interrupt, stop

_POLL_S = 0.1


@dataclass
class _Started(Generic[Job]):
    job: Job
    process: subprocess.Popen
    held: bool = False

    def hold(self) -> None:
        self._send(signal.SIGSTOP)
        self.held = True

    def go_on(self) -> None:
        self._send(signal.SIGCONT)
        self.held = False

    def end(self) -> None:
        self._send(signal.SIGTERM)  # which a stopped run hears before it does anything else
        self.go_on()

    def _send(self, sent: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, sent)


_Lanes = Mapping[Slot, deque[_Started[Job]]]


def run_in_turns(
    jobs: Sequence[Job],
    slots: Sequence[Slot],
    start: Callable[[Job, Slot], subprocess.Popen],
    has_stepped: Callable[[Job], bool],
    has_trained: Callable[[Job], bool],
    ended: Callable[[Job, int], None],
    *,
    ahead: int = 1,
    seconds: float = math.inf,
    least: float = 0.0,
) -> list[Job]:
    """Run every job, in order, each slot one at a time with `ahead` more that compile; returns those that did not end.

    `start(job, slot)` gives its process, which leads its own process group; `has_stepped(job)` says whether it has made
    its first step, `has_trained(job)` whether its last; `ended(job, status)` hears of its end. After `seconds` the runs
    that are left are ended, and none is started whose turn would come with less than `least` seconds to go if each
    before it took so long. Whatever ends this early (Ctrl-C, SIGTERM, an error) ends every process first, stopped ones
    too.
    """
    until = time.monotonic() + seconds
    waiting = deque(jobs)
    lanes: _Lanes[Job] = {slot: deque() for slot in slots}
    trained: deque[_Started[Job]] = deque()
    with sigterm_as_interrupt():
        try:
            while time.monotonic() < until:
                for run, status in _take_ended([*lanes.values(), trained]):
                    ended(run.job, status)
                trained.extend(_take_trained(lanes, has_trained))
                _fill(lanes, waiting, start, 1 + ahead, (until - time.monotonic()) / least if least else math.inf)
                if not any(lanes.values()) and not trained:
                    break
                _hold_early(lanes, has_stepped)
                time.sleep(_POLL_S)
        finally:
            left = list(itertools.chain(trained, *lanes.values()))
            for run in left:
                run.end()
            stop([run.process for run in left])
    return [*(run.job for run in left), *waiting]


def _take_ended(lanes: Sequence[deque[_Started[Job]]]) -> Iterator[tuple[_Started[Job], int]]:
    """Take the runs that have ended out of their lanes; the next in line goes on before its end is told."""
    for lane in lanes:
        gone = [(run, status) for run in lane if (status := run.process.poll()) is not None]
        for run, _ in gone:
            lane.remove(run)
        _let_go_on(lane)
        yield from gone


def _take_trained(lanes: _Lanes[Job], has_trained: Callable[[Job], bool]) -> Iterator[_Started[Job]]:
    """Take the runs that only come to their end out of their lanes."""
    for lane in lanes.values():
        if lane and has_trained(lane[0].job):
            run = lane.popleft()
            _let_go_on(lane)
            yield run


def _let_go_on(lane: deque[_Started[Job]]) -> None:
    if lane and lane[0].held:
        lane[0].go_on()


def _fill(
    lanes: _Lanes[Job], waiting: deque[Job], start: Callable[[Job, Slot], subprocess.Popen], depth: int, turns: float
) -> None:
    """Start runs up to `depth` in each lane, first those that train at once; `turns`: how many are left of the time."""
    for position in range(depth):
        for slot, lane in lanes.items():
            if waiting and len(lane) == position and turns >= position + 1:
                job = waiting.popleft()
                lane.append(_Started(job, start(job, slot)))


def _hold_early(lanes: _Lanes[Job], has_stepped: Callable[[Job], bool]) -> None:
    for lane in lanes.values():
        for run in itertools.islice(lane, 1, None):
            if not run.held and has_stepped(run.job):
                run.hold()
