import io

from rich.console import Console

from depthroute.studies import live

from .conftest import STUDY


def test_a_terminal_shows_a_table_of_what_is_done(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(live, "_REFRESH_S", 0.0)
    fake.console = Console(file=io.StringIO(), width=160, force_terminal=True, color_system=None)
    fake.fails["mhar-h1/seed-0"] = (1, "ValueError: no luck in [/here]")
    fake.study(tmp_path)
    assert "example: 5 of 6 runs finished" in fake.output
    assert "failed: ValueError: no luck in [/here]" in fake.output
    assert "running" in fake.output
    assert "10/10" in fake.output
    assert "5.0000" in fake.output


def test_elsewhere_a_line_is_never_broken_nor_its_brackets_taken_for_markup(fake, tmp_path):
    fake.console.width = 30
    fake.study(tmp_path, {**STUDY, "name": "a name in [red] that is longer than the line"})
    first, *others = fake.output.splitlines()
    assert first == "a name in [red] that is longer than the line: 6 runs, 0 of them finished before"
    assert any("[red]" in line for line in others)  # the title of the table


def test_elsewhere_there_is_a_line_for_each_start_and_end(fake, tmp_path):
    fake.fails["mhar-h1/seed-0"] = (1, "ValueError: no luck in [/here]")
    fake.study(tmp_path)
    lines = fake.output.splitlines()
    assert lines[0] == "example: 6 runs, 0 of them finished before"
    assert sum(line.endswith(("started on worker 0", "started on worker 1")) for line in lines) == 6
    assert sum(" finished  10/10  held-out loss 5.0000" in line for line in lines) == 5
    assert any("mhar-h1/seed-0 failed: ValueError: no luck in [/here]" in line for line in lines)
