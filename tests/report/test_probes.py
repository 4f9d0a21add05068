"""Pages and figures about what a probe found."""

from __future__ import annotations

import copy
import json
import shutil

import numpy as np
import pytest

from depthroute.report import build_report, maps, probe_figures
from depthroute.report.folders import read_folder
from depthroute.report.probes import Probe, read_probe
from depthroute.report.shapes import NUMBER, OPTIONAL_NUMBER, TEXT, WHOLE, mismatch


@pytest.fixture
def probe(probed):
    return lambda heads: read_probe(probed[heads], [])


def test_a_probed_model_is_read_with_the_numbers_of_its_file(probed):
    for heads, folder in probed.items():
        found = read_folder(folder)
        assert (found.kind, found.name, found.runs) == ("probe", f"small-h{heads}", ())
        assert found.probes[0].found == json.loads((folder / "probe.json").read_text())


def test_sentences_say_what_one_head_and_what_several_have(probe):
    one, two = " ".join(probe(1).statement), " ".join(probe(2).statement)
    kl = probe(1).disagreement["contiguous"]
    assert f"One of 4 slices of a query, reading alone, is {kl['kl']:.3f} nats from what the whole query reads" in one
    assert f"The excess over random queries is {kl['excess']:+.3f}".replace("-", "−") in one  # noqa: RUF001
    largest = probe(2).deviation["largest"]
    assert f"A weight of one of the 2 route heads is up to {largest['largest']:.3f} away from the mean" in two
    assert f"{largest['null']:.3f} ± {largest['null_sd']:.3f}" in two


def test_curves_of_slices_are_those_of_the_file(probe):
    found = probe(1)
    axes = probe_figures.disagreement(found).axes[0]
    rows = found.disagreement["by_num_sources"]
    assert axes.lines[0].get_xdata().tolist() == [row["num_sources"] for row in rows]
    assert list(axes.lines[0].get_ydata()) == [row["contiguous"]["kl"] for row in rows]
    assert list(axes.lines[1].get_ydata()) == [row["contiguous"]["null"] for row in rows]


def test_shares_and_deviations_are_those_of_the_file(probe):
    found = probe(2)
    bars = [bar.get_height() for bar in probe_figures.source_shares(found).axes[0].patches]
    assert bars == [source["relative_weight"] for source in found.found["heads"]["sources"]]
    lines = probe_figures.largest_deviation(found).axes[0].lines
    assert list(lines[0].get_ydata()) == [site["largest"]["largest"] for site in found.sites]
    image = maps.deviation_map(found.sites, 1, 0.5).axes[0].images[0]
    assert image.get_array()[0].compressed().tolist() == found.sites[0]["deviation"][1]
    assert image.get_clim() == (-0.5, 0.5)
    assert probe_figures.evenness(found).axes[0].get_ylim()[0] <= 0


def test_a_correlation_that_is_not_known_stays_blank():
    image = maps.correlation_matrix([[1.0, None], [None, 1.0]]).axes[0].images[0].get_array()
    assert np.ma.getmaskarray(image).tolist() == [[False, True], [True, False]]


def test_fresh_queries_have_a_page(probed, tmp_path):
    """Nothing deviates, nothing varies: correlations are null and the largest deviation is 0."""
    found = json.loads((probed[2] / "probe.json").read_text())
    for site in found["heads"]["sites"]:
        site["deviation"] = [[0.0] * len(site["sources"])] * 2
        site["split_half"] = None
        site["largest"] = {"largest": 0.0, "null": 0.0, "null_sd": None, "excess": 0.0}
    unknown = {"r": None, "null": None}
    found["heads"]["deviation"] = {
        "largest": {"largest": 0.0, "null": 0.0, "null_sd": None, "excess": 0.0},
        "split_half": unknown,
        "between_heads": {**unknown, "by_centring": -1.0, "matrix": [[None, None], [None, None]]},
    }
    (tmp_path / "probe.json").write_text(json.dumps(found))
    assert "is up to 0.000 away" in build_report(tmp_path).read_text()


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        (("heads", "sites", 0, "weights"), "x", r"heads\.sites\[0\]\.weights is a text; wanted a list"),
        (("heads", "sites", 0, "weights"), [[1.0]], r"the weights of mlp 0 are not 2 rows of 2 numbers"),
        (("heads", "sites"), [], r"heads\.sites is empty"),
        (("heads", "deviation"), None, r"heads\.deviation is null; wanted an object"),
        (("disagreement",), {}, r"disagreement is an object; wanted null"),
        (("tokens",), float("nan"), r"tokens is another number; wanted a finite number"),
    ],
)
def test_a_damaged_probe_is_named_in_one_line(probed, tmp_path, path, value, fault):
    content = json.loads((probed[2] / "probe.json").read_text())
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (tmp_path / "probe.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"has nothing to show; probe\.json: damaged \({fault}\)"):
        build_report(tmp_path)


def test_slices_of_other_sites_than_the_heads_are_damage(probed, tmp_path):
    content = json.loads((probed[1] / "probe.json").read_text())
    del content["disagreement"]["sites"][0]
    (tmp_path / "probe.json").write_text(json.dumps(content))
    problems = []
    assert read_probe(tmp_path, problems) is None
    assert problems == ["probe.json: damaged (heads and disagreement are of different sites)"]


def test_the_probe_of_a_run_and_of_the_first_seed_of_each_arm_is_shown_with_them(
    probed, tmp_path, make_run, make_study
):
    run = make_run(tmp_path / "run", name="my run", steps=100)
    shutil.copy(probed[1] / "probe.json", run)
    assert [found.label for found in read_folder(run).probes] == ["my run"]
    study = make_study(tmp_path / "study", {"additive": {0: 3.4, 1: 3.4}, "mhar": {0: 3.3, 1: 3.2}}, layers=1)
    for seed in (0, 1):
        shutil.copy(probed[2] / "probe.json", study / "runs" / "mhar" / f"seed-{seed}")
    (study / "runs" / "additive" / "seed-0" / "probe.json").write_text("{}")
    found = read_folder(study)
    assert [one.label for one in found.probes] == ["mhar, seed 0"]
    assert found.problems == ("additive/seed-0/probe.json: damaged (model is missing)",)
    page = build_report(study).read_text()
    assert "What the queries learned: mhar, seed 0" in page
    assert 'href="../runs/mhar/seed-0/probe.json"' in page


def test_shapes_name_the_first_place_that_differs():
    shape = {"a": [{"b": NUMBER}], "c": TEXT, "d": OPTIONAL_NUMBER, "e": WHOLE, "f": None}
    good = {"a": [{"b": 1.5}, {"b": 2}], "c": "", "d": None, "e": 3, "f": None, "more": 0}
    assert mismatch(good, shape) is None
    for change, fault in (
        ({"a": [{"b": 1}, {}]}, "a[1].b is missing"),
        ({"a": {}}, "a is an object; wanted a list"),
        ({"c": None}, "c is null; wanted a text"),
        ({"d": "1"}, "d is a text; wanted a finite number or null"),
        ({"e": 3.0}, "e is another number; wanted a whole number"),
        ({"e": True}, "e is true or false; wanted a whole number"),
        ({"f": 0}, "f is a number; wanted null"),
    ):
        assert mismatch({**copy.deepcopy(good), **change}, shape) == fault
    assert mismatch([], shape) == "the file is a list; wanted an object"


def test_labels_come_from_the_file_where_there_is_no_run(probed):
    assert read_probe(probed[1], []) == Probe(
        "small-h1", probed[1] / "probe.json", json.loads((probed[1] / "probe.json").read_text())
    )
