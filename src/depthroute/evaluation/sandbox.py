"""Run a Python program that nobody has read, in a bubblewrap sandbox.

The program sees this interpreter and its packages, read-only, and an empty folder of its own in memory. It has no
network, no other process, no file of the machine, and limits on time, memory, processes and bytes written.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_FOLDER = "/box"
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/urandom")
# One thread each for libraries that would start as many as there are cores.
_ENVIRONMENT = {"HOME": _FOLDER, "TMPDIR": _FOLDER, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_SPARE_UIDS = range(60578, 61184)  # that neither distributions nor systemd give away

# Runs inside. What it says comes before the program can, or after all of it has run: a program that ends early, by
# any exit code, has not passed. In an empty namespace, as lm-eval's own scorer runs it.
_INSIDE = """
import json, os, resource, sys
job = json.load(sys.stdin)
if job["uid"]:
    os.setgroups([])
    os.setresgid(job["uid"], job["uid"], job["uid"])
    os.setresuid(job["uid"], job["uid"], job["uid"])
for name, value in job["limits"].items():
    resource.setrlimit(getattr(resource, name), (value, value))
said = os.dup(1)
nowhere = os.open("/dev/null", os.O_RDWR)
for stream in (0, 1, 2):
    os.dup2(nowhere, stream)
os.write(said, b"started\\n")
first = os.getpid()
def run(program):
    try:
        exec(compile(program, "<answer>", "exec"), {})
    except BaseException as error:
        return f"failed {type(error).__name__}"
    return "passed"
verdict = run(job["program"])
if os.getpid() == first:  # and not a fork of it
    os.write(said, f"{job['key']} {verdict}\\n".encode())
os._exit(0)
"""


@dataclass(frozen=True)
class Limits:
    """Of one program: seconds on the clock, bytes of memory for each process, processes (and threads), bytes written.

    A file or all files together can be no larger than `written`.
    """

    seconds: float = 10.0
    memory: int = 512 * 2**20
    processes: int = 8
    written: int = 32 * 2**20


@dataclass(frozen=True)
class Outcome:
    """`passed`: the program ran to its end. `reason`: "passed", "failed <exception>", "timed out" or "killed"."""

    passed: bool
    reason: str


def run_program(program: str, limits: Limits | None = None) -> Outcome:
    """Run Python source in a sandbox of its own; passed means that it ran to its end without an exception.

    Raises RuntimeError where bubblewrap is missing or can not make a sandbox on this machine. The verdict is not proof
    against a program that was written to forge it from inside its own interpreter; the machine is.
    """
    limits = limits or Limits()
    key = secrets.token_hex(16)
    uid = _SPARE_UIDS[os.getpid() % len(_SPARE_UIDS)] if os.geteuid() == 0 else 0
    job = {"program": program, "key": key, "uid": uid, "limits": _resource_limits(limits)}
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as complaint:
        process = subprocess.Popen(
            [*_command(limits), sys.executable, "-I", "-c", _INSIDE],
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=complaint,
            start_new_session=True,
        )
        timed_out = False
        try:
            process.communicate(json.dumps(job).encode(), timeout=limits.seconds)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            _end(process)
        said.seek(0)
        lines = said.read(4096).decode("utf-8", errors="replace").split("\n")
        if lines[0] != "started":
            complaint.seek(0)
            _refuse(complaint.read(4096).decode("utf-8", errors="replace"), timed_out, limits)
    verdicts = [line.removeprefix(f"{key} ") for line in lines[1:] if line.startswith(f"{key} ")]
    reason = verdicts[0] if verdicts else "timed out" if timed_out else "killed"
    return Outcome(reason == "passed", reason)


def check_sandbox() -> None:
    """Raise RuntimeError, with the reason, where programs can not be run in a sandbox on this machine."""
    if not run_program("").passed:
        raise RuntimeError("the sandbox for generated code does not run an empty program")


def _command(limits: Limits) -> list[str]:
    program = shutil.which("bwrap")
    if program is None:
        raise RuntimeError(
            "generated code is run only in a bubblewrap sandbox, and there is no bwrap (apt-get install bubblewrap)"
        )
    command = [program, *_namespaces(), "--die-with-parent", "--new-session", "--clearenv", "--hostname", "sandbox"]
    for kind, names in ("--ro-bind-try", (*_SYSTEM, *_interpreter())), ("--dev-bind", _DEVICES):
        for name in names:
            for parent in reversed(Path(name).parents[:-1]):
                command += ["--dir", str(parent)]  # or bubblewrap makes it one that only its maker may enter
            command += [kind, name, name]
    command += ["--proc", "/proc", "--perms", "1777", "--size", str(limits.written), "--tmpfs", _FOLDER]
    command += ["--remount-ro", "/", "--chdir", _FOLDER]
    for name, value in _ENVIRONMENT.items():
        command += ["--setenv", name, value]
    return command


def _namespaces() -> list[str]:
    """Namespaces of its own for everything, and no privileges."""
    if os.geteuid() != 0:
        return ["--unshare-all", "--cap-drop", "ALL"]
    # The kernel's limit on processes does not hold for root, inside a user namespace neither. So root makes no user
    # namespace, and the program runs as a user that owns nothing.
    apart = [f"--unshare-{what}" for what in ("ipc", "pid", "net", "uts")] + ["--unshare-cgroup-try"]
    return [*apart, "--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]


def _interpreter() -> list[str]:
    """The folders that this interpreter and its packages are in, the outer ones first."""
    folders = {str(Path(name).resolve()) for name in (sys.prefix, sys.base_prefix)} | {sys.prefix, sys.base_prefix}
    return sorted(folder for folder in folders if not folder.startswith(tuple(f"{name}/" for name in _SYSTEM)))


def _resource_limits(limits: Limits) -> dict[str, int]:
    return {
        "RLIMIT_AS": limits.memory,
        "RLIMIT_NPROC": limits.processes,
        "RLIMIT_FSIZE": limits.written,
        "RLIMIT_CPU": int(limits.seconds) + 1,
        "RLIMIT_CORE": 0,
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left. With bubblewrap dies the first process of the sandbox, and with that all of its processes."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _refuse(complaint: str, timed_out: bool, limits: Limits) -> None:
    lines = [line for line in complaint.splitlines() if line.strip()]
    what = lines[-1] if lines else f"it did not start within {limits.seconds:g} s" if timed_out else "no reason given"
    raise RuntimeError(f"generated code is run only in a bubblewrap sandbox, and none can be made here: {what}")
