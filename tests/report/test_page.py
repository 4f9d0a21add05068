"""The page: self-contained, whole, safe, and true to its files."""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from depthroute import report
from depthroute.report import build_report
from depthroute.report.inline_svg import inline_svg

SCRIPT = (Path(report.__file__).parent / "templates" / "sort.js").read_text()

LOSSES = {"additive": {0: 3.34, 1: 3.33}, "mhar": {0: 3.29, 1: 3.27}}
EVIL = "<script>alert('x')</script>&\"<img src=x onerror=alert(1)>"
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """What a page holds; `unbalanced` are tags that do not close in order."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.ids, self.links, self.sources, self.handlers = [], [], [], [], []
        self.open, self.unbalanced, self.text, self.scripts, self.numbers = [], [], "", [], []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self._note(attributes)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self._note(attributes)

    def _note(self, attributes):
        for key, value in attributes:
            if key == "id":
                self.ids.append(value)
            elif key in ("href", "xlink:href"):
                self.links.append(value)
            elif key == "data-value" and value:
                self.numbers.append(value)
            elif key == "src":
                self.sources.append(value)
            elif key.startswith("on"):
                self.handlers.append(key)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.unbalanced.append(tag)

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        else:
            self.text += data


def read(path):
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def study(tmp_path_factory, make_study):
    """A study folder with its report; tests that change it take a copy."""
    folder = make_study(tmp_path_factory.mktemp("reports") / "a study #1", LOSSES, layers=1, heads=2)
    build_report(folder)
    return folder


@pytest.fixture
def copy(study, tmp_path):
    return Path(shutil.copytree(study, tmp_path / "study"))


def check_self_contained(path):
    page = read(path)
    assert page.unbalanced == []
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    assert page.sources == []
    assert page.handlers == []
    assert not {"link", "iframe", "object", "img", "base", "form"} & set(page.tags)
    assert page.scripts == [SCRIPT]
    for link in page.links:
        if link.startswith("#"):
            assert link[1:] in page.ids
        elif not link.startswith("data:image/png;base64,"):
            assert (path.parent / unquote(link)).is_file(), link
    return page


def test_a_study_page_is_whole_and_every_link_leads_somewhere(study):
    path = study / "report" / "index.html"
    page = check_self_contained(path)
    for text in ("3.3350", "3.2800", "−0.0550", "6.9213", "unigram entropy", "route head 1", "0123abc", "embedded"):  # noqa: RUF001
        assert text in page.text
    assert "mhar has the lowest held-out loss: 3.2800" in page.text


def test_every_figure_on_the_page_is_a_file_too_and_linked(study):
    path = study / "report" / "index.html"
    page = read(path)
    files = {f"figures/{found.name}" for found in (path.parent / "figures").iterdir()}
    assert files == {link for link in page.links if link.startswith("figures/")}
    assert len(files) == page.tags.count("svg") == 3 + 2


def test_every_file_of_every_run_is_linked(study):
    page = read(study / "report" / "index.html")
    links = {unquote(link) for link in page.links}
    for run in study.glob("runs/*/seed-*"):
        assert {f"../{found.relative_to(study)}" for found in run.iterdir()} <= links


def test_computed_numbers_are_kept_in_full_precision(study):
    path = study / "report" / "index.html"
    (comparison,) = json.loads((path.parent / "numbers.json").read_text())["comparisons"]
    mhar = comparison["arms"][1]
    assert mhar["difference"]["mean"] == pytest.approx(-0.055, abs=1e-12)
    assert mhar["difference"]["seeds"] == [0, 1]


def test_a_run_page_describes_that_run(tmp_path, make_run, make_read_weights):
    folder = make_run(tmp_path / "run", name="my run", steps=200, weights=make_read_weights(1, 1))
    page = check_self_contained(build_report(folder))
    assert "my run reached a held-out loss of 3.3000 nats per token after 13.1 M tokens (200 steps)." in page.text
    assert "Difference to" not in page.text


def test_a_mid_training_page_shows_gates_queries_and_errors_over_sequences(tmp_path, make_run):
    (tmp_path / "study.yaml").write_text("{name: mid, arms: {a: {}, b: {}}, baseline: a, seeds: [0]}")
    for arm, gates in (("a", 0), ("b", 3)):
        folder = tmp_path / "runs" / arm / "seed-0"
        make_run(folder, name=arm, loss=3.0 - 0.1 * gates, steps=200, gates=gates, sequences=20)
    page = check_self_contained(build_report(tmp_path))
    figures = {path.stem for path in (tmp_path / "report" / "figures").iterdir()}
    assert figures == {
        "loss",
        "paired-difference",
        "paired-difference-averaged",
        "throughput",
        "gates-2-b",
        "query-norms-2-b",
    }
    for text in (
        "Gates of b",
        "Norms of the queries of b",
        "one standard error over the held-out sequences",
        "± after a last evaluation is its standard error",
        "With averaged weights the last evaluations are: a 3.0090, b 2.7090",
    ):
        assert text in page.text


def test_a_grid_page_has_a_part_for_each_point(tmp_path, make_run):
    (tmp_path / "study.yaml").write_text(
        "{name: grid, arms: {additive: {}, mhar: {}}, baseline: additive, seeds: [0], grid: {size: [1, 2]}}"
    )
    for arm, loss in (("additive", 3.3), ("mhar", 3.2)):
        for size in (1, 2):
            make_run(tmp_path / "runs" / f"{arm},size={size}" / "seed-0", loss=loss - size, name=arm, steps=200)
    page = check_self_contained(build_report(tmp_path))
    assert "size=1: mhar has the lowest held-out loss: 2.2000" in page.text
    assert "size=2: mhar has the lowest held-out loss: 1.2000" in page.text
    assert page.tags.count("svg") == 6


def test_nothing_from_names_or_files_becomes_markup(tmp_path, make_study):
    folder = make_study(tmp_path / "study", {"additive": {0: 3.3}, EVIL: {0: 3.2}}, layers=1, heads=1)
    weights = json.loads((folder / "runs" / EVIL / "seed-0" / "read_weights.json").read_text())
    weights[0]["name"] = EVIL
    weights[0]["sources"][0] = weights[1]["sources"][0] = EVIL
    run = folder / "runs" / EVIL / "seed-0"
    (run / "read_weights.json").write_text(json.dumps(weights))
    (run / "recipe.yaml").write_text(json.dumps({"data": {EVIL: EVIL}, "note": EVIL}))
    (run / "environment.json").write_text(json.dumps({EVIL: [EVIL], "devices": EVIL}))
    failed = folder / "runs" / EVIL / "seed-1"
    failed.mkdir()
    (failed / "failure.json").write_text(json.dumps({"error": EVIL}))
    (folder / "samples.json").write_text(json.dumps([{"arm": EVIL, "prompt": EVIL, "text": EVIL + EVIL}]))
    settings = {"name": EVIL, "description": "</style>", "arms": {"additive": {}, EVIL: {}}, "seeds": [0, 1]}
    (folder / "study.yaml").write_text(json.dumps({**settings, "baseline": "additive"}))
    page = check_self_contained(build_report(folder))
    assert page.text.count(EVIL) > 10
    assert page.tags.count("style") == 1
    for figure in (folder / "report" / "figures").iterdir():
        assert "<script" not in figure.read_text()
        assert "onerror=alert(1)>" not in figure.read_text()


def test_the_page_allows_its_own_script_alone(study):
    html = (study / "report" / "index.html").read_text()
    own = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{own}'"
    assert f'content="{policy}; base-uri' in html


def numbers_in(value):
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(inner)
    elif isinstance(value, float):
        yield value


@pytest.mark.parametrize("kind", ["study", "probe", "evaluation"])
def test_every_number_of_a_table_stands_in_a_file_that_the_page_links(kind, study, tmp_path, probed, make_evaluation):
    folder = study if kind == "study" else tmp_path
    if kind == "probe":
        shutil.copy(probed[2] / "probe.json", folder)
    elif kind == "evaluation":
        make_evaluation(folder, {"plain": 0.0, "routed": 0.3})
    page = check_self_contained(build_report(folder))
    shown = {float(number) for number in page.numbers if not number.isdecimal() and number != "nan"}
    linked = {folder / "report" / unquote(link) for link in page.links if link.endswith(".json")}
    known = {number for path in linked for number in numbers_in(json.loads(path.read_text()))}
    assert len(shown) > 8
    assert shown <= known


def test_unfinished_and_failed_runs_are_shown_with_their_reason(copy):
    (copy / "runs" / "mhar" / "seed-1" / "summary.json").unlink()
    (copy / "runs" / "additive" / "seed-1" / "summary.json").unlink()
    (copy / "runs" / "additive" / "seed-1" / "failure.json").write_text('{"error": "RuntimeError: out of memory"}')
    page = check_self_contained(build_report(copy))
    assert "runs/mhar/seed-1: unfinished: no summary.json; the last recorded step is 2000" in page.text
    assert "runs/additive/seed-1: failed: RuntimeError: out of memory" in page.text
    assert "2 of 4 runs are not finished" in page.text


def test_a_study_of_which_nothing_ran_yet_has_a_page(tmp_path):
    (tmp_path / "study.yaml").write_text("{name: later, arms: {a: {}, b: {}}, baseline: a, seeds: [0]}")
    page = check_self_contained(build_report(tmp_path))
    assert "No run is finished yet, so there is nothing to compare." in page.text
    assert page.text.count("not started") == 2


def test_generated_text_is_shown_once_with_its_prompt(copy):
    (copy / "samples.json").write_text(json.dumps({"arm": "mhar", "prompt": "It was", "text": "It was a dark night"}))
    page = read(build_report(copy))
    assert page.text.count("It was a dark night") == 1


def test_a_new_report_replaces_the_old_one_and_its_figures(copy):
    path = build_report(copy)
    before = path.read_text()
    stale = path.parent / "figures" / "read-weights-9-gone-head-0.svg"
    stale.write_text("old")
    assert build_report(copy) == path
    assert path.read_text() == before
    assert not stale.exists()
    assert not list(path.parent.rglob("*.partial"))


def test_settings_in_which_arms_differ_stand_apart_from_those_they_share(study):
    html = (study / "report" / "index.html").read_text()
    assert '<th scope="col">residual.num_heads</th>' in html
    assert "<dt>sequence_length</dt><dd>256</dd>" in html
    assert "<dt>scheme</dt>" not in html


def test_inline_figures_take_the_text_colour_and_their_own_ids():
    svg = (
        '<?xml version="1.0"?>\n<svg width="72pt" height="36pt" viewBox="0 0 72 36" xmlns="http://www.w3.org/2000/svg">'
        '<defs><style type="text/css">*{stroke: red}</style></defs><clipPath id="p1"/><g clip-path="url(#p1)">'
        '<use xlink:href="#m1" style="fill: #77787a"/></g></svg>'
    )
    found = str(inline_svg(svg, "loss", 'a "label"'))
    assert found.startswith('<svg viewBox="0 0 72 36"')
    assert 'aria-label="a &#34;label&#34;" style="max-width:96px">' in found
    assert 'id="loss-p1"' in found
    assert "url(#loss-p1)" in found
    assert 'href="#loss-m1"' in found
    assert "fill: currentColor" in found
    assert "<style" not in found


def test_without_the_extra_the_report_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("depthroute.report")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    wanted = r"depthroute\.report needs matplotlib: pip install 'depthroute\[report\]'"
    with pytest.raises(ModuleNotFoundError, match=wanted) as caught:
        importlib.import_module("depthroute.report")
    assert caught.value.name == "matplotlib"
