"""Figures: right numbers, one look, no traces."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from depthroute.report import drawing, figures, maps
from depthroute.report.curves import band, difference_band, points
from depthroute.report.folders import read_folder
from depthroute.report.style import BASELINE, INK, PALETTE, strokes

LOSSES = {"additive": {0: 3.34, 1: 3.33}, "$x_1$ <b>": {0: 3.29, 1: 3.28}, "_hidden": {0: 3.28, 1: 3.26}}


@pytest.fixture
def study(tmp_path, make_study):
    return read_folder(make_study(tmp_path / "study", LOSSES, layers=1, heads=1)).groups[0]


@pytest.fixture
def colours(study):
    return strokes(study.arms, study.baseline)


def texts(svg):
    return {"".join(found.itertext()) for found in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")}


def test_bands_are_the_mean_and_range_at_the_tokens_that_all_seeds_have():
    found = band([{0: 4.0, 10: 3.0, 20: 2.0}, {10: 3.4, 20: 2.8, 30: 1.0}])
    assert found.tokens.tolist() == [10, 20]
    assert found.mean == pytest.approx([3.2, 2.4])
    assert found.low == pytest.approx([3.0, 2.0])
    assert found.high == pytest.approx([3.4, 2.8])


def test_differences_are_taken_seed_by_seed(study):
    pairs = list(zip(study.of("_hidden"), study.of("additive"), strict=True))
    found = difference_band(pairs)
    left, right = ([points(run.evaluations) for run in study.of(arm)] for arm in ("_hidden", "additive"))
    last = found.tokens[-1]
    by_hand = [a[last] - b[last] for a, b in zip(left, right, strict=True)]
    assert found.mean[-1] == pytest.approx(np.mean(by_hand))
    assert (found.low[-1], found.high[-1]) == pytest.approx((min(by_hand), max(by_hand)))


def test_lines_of_the_loss_figure_are_the_means_over_seeds(study, colours):
    axes = figures.loss_curves(study, colours).axes[0]
    lines = {line.get_color(): line for line in axes.lines}
    expected = band(points(run.evaluations) for run in study.of("_hidden"))
    assert np.array_equal(lines[colours["_hidden"].colour].get_xdata(), expected.tokens)
    assert np.array_equal(lines[colours["_hidden"].colour].get_ydata(), expected.mean)


def test_the_unigram_entropy_is_a_line_with_a_name_where_it_is_in_sight(study, colours):
    assert "unigram entropy" in texts(drawing.to_svg(figures.loss_curves(study, colours, 3.5)))
    assert "unigram entropy" not in texts(drawing.to_svg(figures.loss_curves(study, colours, 50.0)))


def test_a_run_that_did_not_finish_is_a_line_of_its_own(tmp_path, make_study):
    folder = make_study(tmp_path / "study", {"additive": {0: 3.3, 1: 3.4}}, layers=1)
    (folder / "runs" / "additive" / "seed-1" / "summary.json").unlink()
    group = read_folder(folder).groups[0]
    mean, alone, _ = figures.loss_curves(group, strokes(group.arms, "additive")).axes[0].lines
    assert mean.get_ydata()[-1] == group.runs[0].evaluations[-1]["loss"]
    assert alone.get_ydata()[-1] == group.runs[1].evaluations[-1]["loss"]
    assert alone.get_linewidth() < mean.get_linewidth()


def test_the_training_loss_of_a_single_run_stays_in_sight(tmp_path, make_run):
    folder = make_run(tmp_path / "run")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    below = [line | {"loss": line["loss"] - 2} if line["kind"] == "train" else line for line in lines]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in below))
    group = read_folder(folder).groups[0]
    axes = figures.loss_curves(group, strokes(group.arms, None)).axes[0]
    assert axes.get_ylim()[0] < min(line["loss"] for line in group.runs[0].training)


def test_figures_without_data_are_left_out(tmp_path, make_run):
    folder = make_run(tmp_path / "run", finished=False)
    (folder / "metrics.jsonl").write_text("")
    group = read_folder(folder).groups[0]
    colours = strokes(group.arms, None)
    assert figures.loss_curves(group, colours) is None
    assert figures.paired_differences(group, colours) is None
    assert figures.throughput(group, colours) is None


def test_a_curve_for_each_read_in_the_order_of_the_reads(tmp_path, make_run):
    (run,) = read_folder(make_run(tmp_path / "run", steps=300, gates=12)).runs
    for key, label in (("gates", "gate"), ("query_norms", "norm")):
        axes, bar = figures.parameter_curves(run, key, label).axes
        assert (axes.get_xlabel(), axes.get_ylabel(), bar.get_ylabel()) == ("training tokens", label, "read")
        assert len(axes.lines) == 12
        assert [line["tokens"] for line in run.readings] == list(axes.lines[0].get_xdata())
        tenth = [line[key][f"model.residual.reads.10.{'gate' if key == 'gates' else 'query'}"] for line in run.readings]
        assert list(axes.lines[10].get_ydata()) == tenth
        assert len({line.get_color() for line in axes.lines}) == 12


def test_a_run_without_readings_has_no_such_curves(tmp_path, make_run):
    (run,) = read_folder(make_run(tmp_path / "run", steps=100)).runs
    assert figures.parameter_curves(run, "gates", "gate") is None


def mid_training(folder, make_run, arms=("control", "gated"), seeds=(0,)):
    """A study whose runs know the losses of their held-out sequences."""
    listed = ", ".join(f"{arm}: {{}}" for arm in arms)
    folder.mkdir()
    (folder / "study.yaml").write_text(f"{{name: mid, arms: {{{listed}}}, baseline: control, seeds: {list(seeds)}}}")
    for i, arm in enumerate(arms):
        for seed in seeds:
            place = folder / "runs" / arm / f"seed-{seed}"
            make_run(place, name=arm, seed=seed, loss=3.0 - 0.02 * i, steps=300, gates=4 * i, sequences=20)
    return read_folder(folder).groups[0]


@pytest.mark.parametrize(("averaged", "key"), [(False, "losses"), (True, "ema_losses")])
def test_one_pair_has_a_band_of_one_standard_error_over_its_sequences(tmp_path, make_run, averaged, key):
    group = mid_training(tmp_path / "study", make_run)
    control, gated = group.runs
    axes = figures.paired_differences(group, strokes(group.arms, "control"), averaged).axes[0]
    apart = np.subtract(gated.sequence_losses[300][key], control.sequence_losses[300][key])
    _, line = axes.lines
    assert line.get_ydata()[-1] == pytest.approx(apart.mean())
    edges = axes.collections[0].get_paths()[0].vertices
    last = edges[edges[:, 0] == line.get_xdata()[-1], 1]
    assert last.max() - last.min() == pytest.approx(2 * apart.std(ddof=1) / np.sqrt(20))


def test_several_pairs_have_a_band_over_their_seeds(tmp_path, make_run):
    group = mid_training(tmp_path / "study", make_run, seeds=(0, 1))
    axes = figures.paired_differences(group, strokes(group.arms, "control")).axes[0]
    expected = difference_band(group.pairs("gated"))
    assert axes.lines[1].get_ydata() == pytest.approx(expected.mean)


def test_a_map_shows_each_weight_at_its_site_and_source(make_read_weights):
    sites = make_read_weights(layers=2, heads=2)
    image = maps.read_weight_map(sites, 1, 1.0).axes[0].images[0].get_array()
    assert image.shape == (4, 5)
    for row, site in enumerate(sites):
        assert image[row, : len(site["sources"])].tolist() == site["weights"][1]
        assert image[row, len(site["sources"]) :].mask.all()


def test_columns_of_block_maps_keep_the_order_of_every_site():
    lists = [
        ["embedding", "partial"],
        ["embedding", "block 0"],
        ["embedding", "block 0", "partial"],
        ["embedding", "block 0", "block 1"],
    ]
    assert maps.merge_names(lists) == ["embedding", "block 0", "block 1", "partial"]
    assert maps.merge_names([["null", "embedding"], ["null", "embedding", "block 0"]])[0] == "null"


@pytest.mark.parametrize("n", [1, 2, 9, 13, 14, 25, 49, 73, 129])
def test_ticks_are_few_apart_and_reach_both_ends(n):
    ticks = drawing.thin_ticks(n)
    assert ticks[0] == 0
    assert ticks[-1] == n - 1
    assert len(ticks) <= 14
    gaps = np.diff(ticks)
    assert gaps.size == 0 or gaps.min() >= gaps.max() / 2


def test_an_arm_has_one_colour_in_every_figure(study, colours):
    drawn = [figures.loss_curves(study, colours), figures.paired_differences(study, colours)]
    drawn.append(figures.throughput(study, colours))
    for figure in drawn:
        svg = drawing.to_svg(figure)
        assert all(colours[arm].colour in svg for arm in study.arms)


def test_names_are_shown_as_they_are_and_the_svg_is_well_formed(study, colours):
    found = texts(drawing.to_svg(figures.loss_curves(study, colours)))
    assert {"additive", "$x_1$ <b>", "\N{THIN SPACE}_hidden"} <= found


def test_long_names_are_cut_in_figures(tmp_path, make_study):
    losses = {"additive": {0: 3.3}, "a" * 60: {0: 3.2}}
    group = read_folder(make_study(tmp_path / "study", losses, layers=1)).groups[0]
    found = texts(drawing.to_svg(figures.loss_curves(group, strokes(group.arms, "additive"))))
    assert max(map(len, found)) <= drawing.LONGEST_NAME


def test_the_same_numbers_give_the_same_bytes(study, colours):
    first, second = (drawing.to_svg(figures.loss_curves(study, colours)) for _ in range(2))
    assert first == second


def test_figures_are_transparent_and_leave_matplotlib_as_it_was(study, colours):
    before = dict(matplotlib.rcParams)
    svg = drawing.to_svg(figures.loss_curves(study, colours))
    assert dict(matplotlib.rcParams) == before
    assert "#ffffff" not in svg
    assert "#000000" not in svg


def test_more_arms_than_colours_differ_in_their_dashes():
    arms = [f"arm {i}" for i in range(20)]
    found = strokes(["base", *arms], "base")
    assert found["base"].colour == BASELINE
    assert len({(found[arm].colour, str(found[arm].dashes)) for arm in arms}) == 20


# Sight without one kind of cone (Machado, Oliveira, Fernandes 2009, severity 1), on linear RGB.
SIGHT = {
    "normal": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def linear(colour):
    channels = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def cielab(rgb):
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(rgb, 0, 1) / [0.9505, 1, 1.089]
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("sight", SIGHT)
def test_arms_are_told_apart_with_every_kind_of_sight(sight):
    seen = [cielab(np.array(SIGHT[sight]) @ linear(colour)) for colour in (BASELINE, *PALETTE)]
    assert min(np.linalg.norm(a - b) for i, a in enumerate(seen) for b in seen[:i]) > 15


@pytest.mark.parametrize("colour", [INK, BASELINE, *PALETTE])
def test_colours_stand_out_from_light_and_dark_pages(colour):
    luminance = linear(colour) @ [0.2126, 0.7152, 0.0722]
    on_light, on_dark = 1.05 / (luminance + 0.05), (luminance + 0.05) / 0.058  # dark: #14161a
    assert min(on_light, on_dark) > 2.6


@pytest.mark.parametrize("count", range(2, 13))
def test_every_name_of_a_legend_is_inside_the_figure(count):
    names = ["additive", "mhar-h1", "mhar-h1-scaled", "mhar-h4", "mhar-h2", "mhar-h8", "mhar-h16", "block_mhar-h4"]
    names += ["denseformer", "mhc", "hyper_connections-static", "hyper_connections-dynamic"]
    figure, axes = drawing.wide("tokens", "loss")
    for name in names[:count]:
        axes.plot([0, 1], label=name)
    drawing.legend(figure, axes)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    assert figure.legends[0].get_window_extent(canvas.get_renderer()).x1 <= figure.bbox.x1


def test_axes_keep_their_height_below_a_long_legend():
    def height(count):
        figure, axes = drawing.wide("tokens", "loss")
        for i in range(count):
            axes.plot([0, 1], label=f"hyper_connections-{i}")
        drawing.legend(figure, axes)
        FigureCanvasAgg(figure).draw()
        return axes.get_window_extent().height

    assert height(12) > 0.95 * height(4)
