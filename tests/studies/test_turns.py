import os
import signal
import subprocess
import sys
import threading

import pytest

from depthroute.studies.scheduling import Slot
from depthroute.studies.turns import run_in_turns

# A run that steps at once, and then writes down now and then that it is at work, `times` times. "late ..." comes to its
# end only when "c" has written.
_WORKS = """
import pathlib, sys, time
step, log, times = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
step.touch()
time.sleep(0.8)
for _ in range(times):
    with open(log, "a") as file:
        file.write(step.name + "\\n")
    time.sleep(0.02)
if step.name.startswith("late"):
    step.with_name("trained").touch()
    while "c" not in open(log).read().split():
        time.sleep(0.02)
"""


class Runs:
    def __init__(self, folder, times=10):
        self.folder, self.times, self.log = folder, times, folder / "log"
        self.processes, self.ended, self.slots = {}, {}, {}

    def start(self, job, slot):
        command = [sys.executable, "-S", "-c", _WORKS, str(self.folder / job), str(self.log), str(self.times)]
        if job.startswith("fails"):
            command = [sys.executable, "-S", "-c", "raise SystemExit(3)"]
        self.processes[job], self.slots[job] = subprocess.Popen(command, start_new_session=True), slot.name
        return self.processes[job]

    def turns(self, jobs, number=1, **options):
        slots = [Slot(f"slot {index}", {}) for index in range(number)]
        has_stepped = lambda job: (self.folder / job).exists()  # noqa: E731
        has_trained = lambda job: job.startswith("late") and (self.folder / "trained").exists()  # noqa: E731
        return run_in_turns(jobs, slots, self.start, has_stepped, has_trained, self.ended.__setitem__, **options)

    @property
    def order(self):
        return list(dict.fromkeys(self.log.read_text().split()))

    @property
    def worked(self):
        return self.log.read_text().split()


@pytest.fixture
def made(tmp_path):
    return Runs(tmp_path)


def test_runs_work_one_after_the_other_however_many_wait(made):
    assert made.turns(["a", "b", "c"], ahead=2) == []
    assert made.worked == ["a"] * 10 + ["b"] * 10 + ["c"] * 10
    assert made.ended == {"a": 0, "b": 0, "c": 0}


def test_a_run_that_has_trained_holds_up_nobody(made):
    assert made.turns(["late a", "b", "c"]) == []
    assert made.order == ["late", "a", "b", "c"]
    assert list(made.ended) == ["b", "late a", "c"]


def test_a_run_that_has_trained_is_ended_when_the_time_is_over(made):
    assert made.turns(["late a", "b"], seconds=3.0) == ["late a"]
    assert made.ended == {"b": 0}
    assert made.processes["late a"].poll() == -signal.SIGTERM


def test_a_run_that_fails_holds_up_nobody(made):
    assert made.turns(["fails", "a", "fails too", "b"]) == []
    assert made.ended == {"fails": 3, "a": 0, "fails too": 3, "b": 0}
    assert made.worked == ["a"] * 10 + ["b"] * 10


def test_every_slot_trains_before_any_compiles_ahead(made):
    assert made.turns(["a", "b", "c"], number=2) == []
    assert made.slots["a"] == "slot 0"
    assert made.slots["b"] == "slot 1"
    assert set(made.ended.values()) == {0}


def test_when_the_time_is_over_what_is_left_is_ended_and_named(made):
    made.times = 1000
    assert made.turns(["a", "b", "c"], seconds=1.0) == ["a", "b", "c"]
    assert made.ended == {}
    assert list(made.processes) == ["a", "b"]
    assert [made.processes[job].poll() for job in "ab"] == [-signal.SIGTERM] * 2


def test_no_run_is_started_for_which_there_is_no_time(made):
    assert made.turns(["a", "b"], seconds=60, least=100) == ["a", "b"]
    assert made.processes == {}
    assert made.turns(["a", "b"], seconds=60, least=59.9) == ["b"]
    assert made.ended == {"a": 0}


def test_an_interrupt_ends_stopped_runs_too(made):
    made.times = 1000
    timer = threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        made.turns(["a", "b", "c"], ahead=2)
    assert set(made.worked) == {"a"}
    assert [process.poll() for process in made.processes.values()] == [-signal.SIGTERM] * 3
