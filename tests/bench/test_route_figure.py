"""The figure of `bench route`, from a result as route.json holds it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from depthroute.bench import route

pytest.importorskip("matplotlib")
from depthroute.bench import route_figure


def row(shape, arm, median=None, **more):
    found = {"shape": shape, "arm": arm, "sites": 25, "tokens": 4096, "width": 512, "heads": 4, "block": None, **more}
    if median is not None:
        found["check"] = {"green": True}
        found["graph_ms"] = {"median": median, "least": 0.99 * median, "most": 1.01 * median}
    return found


def result(*rows):
    return {"environment": {"device": "Some GPU", "torch": "2.11"}, "dtype": "bf16", "rows": list(rows)}


MIXED = result(
    row("100m", "engine", 1.748),
    row("100m", "compiled", 39.5),
    row("1b-h1", "engine", 5.66, heads=1),
    row("1b-h1", "liger-kernel", heads=1, check={"green": False, "equal_runs": False}),
    row("1b-h1", "flash-attn-res", heads=1, cannot_run="takes a power of two as width, and the shape has 1280"),
    row("1b-h1", "fast-attnres", heads=1, skipped="not installed: pip install fast-attnres"),
    row("8b-delta", "engine", 21.5, sites=64, block=8),
)


def test_it_names_arms_shapes_numbers_and_reasons(tmp_path):
    svg, png = route_figure.write(MIXED, tmp_path)
    text = svg.read_text(encoding="utf-8")
    for part in (
        "two phases", "torch.compile", "1.748 (1.731 to 1.765)", "1b-h1:", "64 sites in blocks of 8, gated",
        "no numbers: two runs differ", "takes a power of two as width", "Some GPU, bf16", "(ms, logarithmic)",
    ):  # fmt: skip
        assert part in text
    assert "fast-attnres" not in text  # nothing was learned of it
    assert png.read_bytes().startswith(b"\x89PNG")


def test_no_two_texts_overlap_and_all_lie_inside():
    drawn = route_figure.figure(MIXED)
    drawn.draw_without_rendering()
    texts = [text for axes in drawn.axes for text in (*axes.texts, axes.title, axes._left_title, axes.xaxis.label)]
    texts += [label for axes in drawn.axes for label in axes.get_yticklabels()]
    low, high = drawn.axes[-1].get_xlim()
    texts += [label for label in drawn.axes[-1].get_xticklabels() if low <= label.get_position()[0] <= high]
    boxes = [text.get_window_extent() for text in texts if text.get_text()]
    inside = drawn.bbox.padded(1)
    assert all(inside.x0 <= box.x0 and box.x1 <= inside.x1 for box in boxes)
    assert all(inside.y0 <= box.y0 and box.y1 <= inside.y1 for box in boxes)
    assert not [1 for i, one in enumerate(boxes) for other in boxes[:i] if one.overlaps(other)]


def test_without_numbers_there_is_no_figure(tmp_path):
    assert route_figure.write(result(row("1b", "engine", skipped="not measured: over 90 s")), tmp_path) == []
    assert not list(tmp_path.iterdir())


def test_it_can_be_drawn_again(tmp_path, capsys):
    (tmp_path / "route.json").write_text(json.dumps(MIXED))
    route_figure.main([str(tmp_path)])
    assert "route.svg" in capsys.readouterr().out
    assert route.draw(MIXED, tmp_path).startswith("figure: ")


def test_a_folder_without_a_result_is_named(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"there is no .*route\.json; `depthroute bench route --out DIR` writes it"
    ):
        route_figure.main([str(tmp_path)])
    (tmp_path / "route.json").write_text("{")
    with pytest.raises(ValueError, match=r"route\.json is damaged"):
        route_figure.main([str(tmp_path)])
    command = [sys.executable, "-m", "depthroute.bench.route_figure", str(tmp_path / "nowhere")]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert found.stderr.startswith("depthroute: error: ")
    assert found.stderr.count("\n") == 1


def test_without_matplotlib_it_says_what_to_install():
    code = (
        "import sys, pathlib; sys.modules['matplotlib'] = None; from depthroute.bench import route; "
        "print(route.draw({}, pathlib.Path('nowhere')))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "no figure: it needs matplotlib, pip install 'depthroute[report]'"
