"""Files that are there as a whole or not at all."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors import SafetensorError

from depthroute.files import alone_in, new_file, new_folder, said_plainly, write_json, write_text


def test_files_are_replaced_as_a_whole(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_text(path, "half")
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": 1}


def test_a_place_for_results_is_no_file_and_lies_in_none(tmp_path):
    (tmp_path / "file").write_text("")
    assert new_folder(tmp_path, "out") == tmp_path
    assert new_folder(tmp_path / "a" / "b", "out") == tmp_path / "a" / "b"
    assert new_file(tmp_path / "file", "out") == tmp_path / "file"
    for path in (tmp_path / "file", tmp_path / "file" / "a"):
        with pytest.raises(ValueError, match=r"^out is .*, but .*/file is a file; wanted a folder"):
            new_folder(path, "out")
    with pytest.raises(ValueError, match=r"^out is .*, which is a folder; wanted a file"):
        new_file(tmp_path, "out")
    with pytest.raises(ValueError, match="/file is a file"):
        new_file(tmp_path / "file" / "a.json", "out")


def test_a_folder_is_held_until_its_holder_is_gone(tmp_path):
    code = "import sys, time\nfrom pathlib import Path\nfrom depthroute.files import alone_in\n"
    code += "with alone_in(Path(sys.argv[1]), 'busy'):\n    print('held', flush=True)\n    time.sleep(60)\n"
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(RuntimeError, match=r"^busy$"), alone_in(tmp_path, "busy"):
        pass
    holder.kill()
    holder.communicate()
    with alone_in(tmp_path, "busy"):
        assert list(tmp_path.iterdir()) == []


def test_a_file_of_torch_that_was_not_written_whole_names_its_folder(tmp_path):
    said = rf"^a file in {tmp_path} could not be written whole; its disk has [\d,.]+ MB free"
    with pytest.raises(OSError, match=said), said_plainly(tmp_path):
        torch.save(torch.zeros(2**20), "/dev/full")
    with pytest.raises(OSError, match=said), said_plainly(tmp_path):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    with pytest.raises(RuntimeError, match="another"), said_plainly(tmp_path):
        raise RuntimeError("another")
