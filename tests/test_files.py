"""Files that are there as a whole or not at all."""

from __future__ import annotations

import json

import pytest

from depthroute.files import write_json, write_text


def test_files_are_replaced_as_a_whole(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_text(path, "half")
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": 1}
