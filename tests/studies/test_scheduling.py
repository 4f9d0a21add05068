import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from depthroute.studies import scheduling
from depthroute.studies.scheduling import Slot, free_slots, run_all


def process(code):
    return subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True)


def slots(number):
    return [Slot(f"slot {index}", {}) for index in range(number)]


def test_every_job_runs_once_and_its_status_is_told():
    ended = {}
    run_all([0, 3, 7], slots(2), lambda job, slot: process(f"raise SystemExit({job})"), ended.__setitem__)
    assert ended == {0: 0, 3: 3, 7: 7}


def test_a_slot_has_one_job_at_a_time_and_none_stays_idle():
    running, most, shown = {}, [], []

    def start(job, slot):
        assert slot.name not in running.values()
        running[job] = slot.name
        most.append(len(running))
        return process("import time; time.sleep(0.1)")

    run_all(range(6), slots(3), start, lambda job, status: running.pop(job), lambda now: shown.append(len(now)))
    assert max(most) == max(shown) == 3
    assert not running


@pytest.mark.parametrize("how", ["error", "ctrl-c", "sigterm"])
def test_whatever_ends_it_early_leaves_no_process(how):
    started = []

    def start(job, slot):
        started.append(process("import time; time.sleep(60)"))
        return started[-1]

    def tick(running):
        if how == "error":
            raise ZeroDivisionError
        os.kill(os.getpid(), signal.SIGINT if how == "ctrl-c" else signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError if how == "error" else KeyboardInterrupt):
        run_all([0, 1], slots(2), start, lambda job, status: None, tick)
    assert [p.poll() for p in started] == [-signal.SIGTERM] * 2
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_process_that_does_not_listen_is_killed(monkeypatch):
    monkeypatch.setattr(scheduling, "_GRACE_S", 0.2)
    deaf = process("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(); time.sleep(60)")
    time.sleep(0.3)

    def tick(running):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all([0], slots(1), lambda job, slot: deaf, lambda job, status: None, tick)
    assert deaf.poll() == -signal.SIGKILL


def test_it_runs_outside_the_main_thread_too():
    ended = {}
    thread = threading.Thread(target=run_all, args=([0], slots(1), lambda job, slot: process(""), ended.__setitem__))
    thread.start()
    thread.join(timeout=20)
    assert ended == {0: 0}


def test_without_a_gpu_there_is_a_slot_of_one_thread_for_each_core(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = free_slots()
    assert len(found) == len(os.sched_getaffinity(0))
    assert {slot.environment["OMP_NUM_THREADS"] for slot in found} == {"1"}
    assert len(free_slots(3)) == 3


def test_with_gpus_there_is_a_slot_for_each_free_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 5")
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in free_slots()] == ["2", "5"]
    assert len(free_slots(1)) == 1
    monkeypatch.setattr(scheduling, "_cores", lambda: 17)
    assert {slot.environment["OMP_NUM_THREADS"] for slot in free_slots()} == {"8"}
    with pytest.raises(ValueError, match="workers: got 3, wants at most 2: one for each free GPU"):
        free_slots(3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    rows = "GPU-aa, 12\nGPU-bb, 70000\nGPU-cc, 0\n"
    monkeypatch.setattr(scheduling.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 0, stdout=rows))
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in free_slots()] == ["GPU-aa", "GPU-cc"]
    rows = "GPU-bb, 70000\n"
    with pytest.raises(RuntimeError, match="every GPU is in use"):
        free_slots()

    def missing(*_, **__):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(scheduling.subprocess, "run", missing)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in free_slots()] == ["0", "1"]


def test_as_many_runs_as_gpus_are_under_way_each_on_its_own(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    most = []

    def start(job, slot):
        told = f"open({str(tmp_path / job)!r}, 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])"
        code = f"import os, time; {told}; time.sleep(0.3)"
        environment = {**os.environ, **slot.environment}
        return subprocess.Popen([sys.executable, "-S", "-c", code], env=environment, start_new_session=True)

    def tick(running):
        most.append(len(running))

    run_all(["a", "b", "c", "d"], free_slots(), start, lambda job, status: None, tick)
    assert [(tmp_path / job).read_text() for job in "abc"] == ["0", "1", "2"]
    assert (tmp_path / "d").read_text() in {"0", "1", "2"}
    assert max(most) == 3


def test_a_study_is_not_started_many_times_by_torchrun(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="start it without torchrun or accelerate"):
        free_slots()


def test_no_workers_are_refused():
    with pytest.raises(ValueError, match="workers: got 0, wants at least 1"):
        free_slots(0)
