"""Hostile programs are stopped and have not passed, and the machine is as it was."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from depthroute.evaluation.sandbox import Limits, run_program

LIMITS = Limits(seconds=3.0)

FORGED_VERDICT = """
import os
for fd in range(64):
    try:
        os.write(fd, b"passed\\n" * 99)
    except OSError:
        pass
os._exit(0)
"""
MANY_THREADS = """
import threading, time
for _ in range(99):
    threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
"""
LEFT_BEHIND = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)", "{mark}"])
"""
WRONG = {
    "an assertion": ("assert 1 == 2", "failed AssertionError"),
    "a syntax error": ("def f(:", "failed SyntaxError"),
    "an early end": ("import sys; sys.exit(0)", "failed SystemExit"),
    "an early end by force": ("import os; os._exit(0)", "killed"),
    "a forged verdict": (FORGED_VERDICT, "killed"),
    "a memory bomb": ("blocks = [bytearray(10**7) for _ in range(10**6)]", "failed MemoryError"),
    "a fork bomb": ("import os\nwhile True:\n    os.fork()", "failed BlockingIOError"),
    "many threads": (MANY_THREADS, "failed RuntimeError"),
    "a large file": ("open('large', 'wb').write(bytes(10**9))", "failed"),
    "many files": ("for name in range(99): open(str(name), 'wb').write(bytes(10**6))", "failed OSError"),
    "a signal to the first process": ("import os\nos.kill(1, 9)\nassert os.getuid() == 0", "failed"),
    "the user root": ("import os\nos.setuid(0)", "failed"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_or_hostile(kind, sandbox):
    program, reason = WRONG[kind]
    outcome = run_program(program, LIMITS)
    assert not outcome.passed
    assert outcome.reason.startswith(reason)


def test_right(sandbox):
    assert run_program("import json, math\nassert math.gcd(6, 4) == 2").passed


def test_it_may_use_its_own_folder(sandbox):
    program = (
        "open('note', 'w').write('x')\nassert open('note').read() == 'x'\nimport os\nassert os.listdir() == ['note']"
    )
    assert run_program(program).passed
    assert run_program("import os\nassert os.listdir() == []").passed


def test_an_endless_loop_is_stopped(sandbox):
    start = time.monotonic()
    assert run_program("while True: pass", Limits(seconds=1.0)).reason == "timed out"
    assert time.monotonic() - start < 5


def test_a_process_left_behind_dies_with_the_sandbox(sandbox):
    mark = f"left-behind-{os.getpid()}"
    program = (
        f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)', '{mark}'])"
    )
    assert run_program(program, LIMITS).passed
    time.sleep(0.2)
    assert not any(mark in command for command in commands())


def commands():
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield file.read_bytes().decode(errors="replace")
        except OSError:
            continue


@pytest.mark.parametrize("place", ["{tmp}/written", "/tmp/written", "/written", "/usr/written", "/dev/written"])
def test_nothing_is_written_outside(place, sandbox, tmp_path):
    place = place.format(tmp=tmp_path)
    assert not run_program(f"open({place!r}, 'w').write('x')", LIMITS).passed
    assert not Path(place).exists()


def test_files_of_the_machine_are_not_seen(sandbox, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    assert run_program(f"open({str(secret)!r})", LIMITS).reason == "failed FileNotFoundError"
    assert run_program("import os\nassert 'HOME' in os.environ\nassert len(os.environ) < 9", LIMITS).passed


def test_there_is_no_network(sandbox):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        program = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=2)"
        assert run_program(program, LIMITS).reason == "failed ConnectionRefusedError"
        with pytest.raises(TimeoutError):
            server.accept()
    out = "import socket\nsocket.create_connection(('192.0.2.1', 80), timeout=2)"
    assert run_program(out, LIMITS).reason == "failed OSError"


def test_without_bubblewrap_it_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"only in a bubblewrap sandbox, and there is no bwrap"):
        run_program("pass")


def test_where_no_sandbox_can_be_made_it_is_refused(monkeypatch, tmp_path):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(RuntimeError, match="none can be made here: bwrap: No permissions to create new namespace"):
        run_program("pass")
