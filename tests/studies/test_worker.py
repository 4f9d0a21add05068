import fcntl
import signal
import subprocess

import pytest

from depthroute.studies import worker


def start(tmp_path, log):
    (tmp_path / "recipe.yaml").write_text("name: [")
    command = worker.command(tmp_path / "recipe.yaml", tmp_path / "run")
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)


def test_a_worker_leaves_a_run_alone_that_another_process_holds(tmp_path):
    with (tmp_path / "log").open("ab") as held, (tmp_path / "log").open("ab") as log:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert start(tmp_path, log).wait(timeout=60) == worker.BUSY
    assert (tmp_path / "log").read_text() == f"{tmp_path / 'run'} is being trained by another process\n"


def test_a_worker_ends_with_its_study(tmp_path):
    with (tmp_path / "log").open("ab") as held, (tmp_path / "log").open("ab") as log:
        fcntl.flock(held, fcntl.LOCK_EX)  # it waits for this run
        process = start(tmp_path, log)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.5)
        process.stdin.close()
        assert process.wait(timeout=10) == -signal.SIGKILL


def test_an_error_is_the_last_line_of_the_log(tmp_path):
    with (tmp_path / "log").open("ab") as log:
        assert start(tmp_path, log).wait(timeout=120) == 1
    assert (tmp_path / "log").read_text().splitlines()[-1].startswith("ValueError: ")
