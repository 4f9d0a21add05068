import io
import json
import math

import pytest
from rich.console import Console

from depthroute.studies import flops
from depthroute.studies.tables import comparison_table

from .conftest import STUDY

RATES = {"optimizer.learning_rate": [1e-3, 3e-3]}


def _losses(fake, table):
    for arm, by_seed in table.items():
        for seed, loss in by_seed.items():
            fake.losses[f"{arm}/seed-{seed}"] = loss


def test_losses_and_paired_differences_of_a_table_with_a_known_answer(fake, tmp_path):
    _losses(fake, {"additive": {0: 5.0, 1: 5.2}, "mhar-h1": {0: 4.9, 1: 5.0}, "mhar-h2": {0: 5.1, 1: 5.3}})
    additive, h1, h2 = fake.study(tmp_path).comparisons["arms"]
    assert additive["loss"]["mean"] == pytest.approx(5.1)
    assert additive["loss"]["standard_deviation"] == pytest.approx(0.02**0.5)
    assert additive["difference"] is None
    # Differences -0.1 and -0.2: mean -0.15, standard error 0.05, t = -3 with one degree of freedom.
    assert h1["difference"]["mean"] == pytest.approx(-0.15)
    assert h1["difference"]["standard_error"] == pytest.approx(0.05)
    assert h1["difference"]["p"] == pytest.approx(0.2048, abs=1e-4)
    assert h2["difference"]["mean"] == pytest.approx(0.1)
    assert (h1["parameters"], h1["residual_parameters"], h1["tokens_per_second"]) == (100, 10, 25.0)
    written = json.loads((tmp_path / "results.json").read_text())["arms"][1]["difference"]
    assert written == {**h1["difference"], "seeds": [0, 1]}


def test_only_seeds_that_both_finished_are_paired(fake, tmp_path):
    _losses(fake, {"additive": {0: 5.0, 1: 9.0}, "mhar-h1": {0: 4.0}})
    fake.fails = {
        "mhar-h1/seed-1": (1, "Error: x"),
        "mhar-h2/seed-0": (1, "Error: x"),
        "mhar-h2/seed-1": (1, "Error: x"),
    }
    _, h1, h2 = fake.study(tmp_path).comparisons["arms"]
    assert (h1["difference"]["mean"], h1["difference"]["n"]) == (-1.0, 1)
    assert h2["loss"] is h2["difference"] is None


def test_arms_of_a_grid_are_set_against_the_baseline_at_the_same_point(fake, tmp_path):
    grid = {"length": {"short": {}, "long": {"training.steps": 20}}}
    for name, loss in {"additive,length=short": 5.0, "mhar-h1,length=short": 4.5}.items():
        _losses(fake, {name: {0: loss, 1: loss}})
    for name, loss in {"additive,length=long": 4.0, "mhar-h1,length=long": 3.9}.items():
        _losses(fake, {name: {0: loss, 1: loss}})
    arms = {arm["label"]: arm for arm in fake.study(tmp_path, {**STUDY, "grid": grid}).comparisons["arms"]}
    assert arms["mhar-h1,length=short"]["difference"]["mean"] == pytest.approx(-0.5)
    assert arms["mhar-h1,length=long"]["difference"]["mean"] == pytest.approx(-0.1)
    assert arms["mhar-h1,length=long"]["baseline"] == "additive,length=long"


def test_best_against_best_where_the_rate_is_an_axis(fake, tmp_path):
    by_rate = {
        "additive": {"0.001": 5.0, "0.003": 4.8},
        "mhar-h1": {"0.001": 4.7, "0.003": 4.9},
        "mhar-h2": {"0.001": 4.6, "0.003": 4.6},
    }
    for arm, losses in by_rate.items():
        _losses(fake, {f"{arm},learning_rate={rate}": {0: loss, 1: loss} for rate, loss in losses.items()})
    fake.fails["mhar-h2,learning_rate=0.001/seed-1"] = (1, "Error: diverged")
    best = {
        row["arm"]: row for row in fake.study(tmp_path, {**STUDY, "grid": RATES}).comparisons["best_learning_rates"]
    }
    assert {arm: row["learning_rate"] for arm, row in best.items()} == {
        "additive": 3e-3,
        "mhar-h1": 1e-3,
        "mhar-h2": 3e-3,
    }
    assert best["mhar-h1"]["difference"]["mean"] == pytest.approx(-0.1)
    assert best["additive"]["difference"] is None
    assert best["mhar-h2"]["incomplete"] == (1e-3,)
    assert best["mhar-h1"]["at_edge"]


def test_readings_at_equal_steps_tokens_and_seconds(fake, tmp_path):
    _losses(fake, {"additive": {0: 5.0, 1: 5.0}, "mhar-h1": {0: 4.0, 1: 4.0}})
    fake.fails = {f"mhar-h2/seed-{seed}": (1, "Error: x") for seed in (0, 1)}
    steps, tokens, seconds = fake.study(tmp_path).comparisons["readings"]
    assert (steps["axis"], steps["at"], steps["losses"]) == ("step", 10.0, {"additive": 5.0, "mhar-h1": 4.0})
    assert (tokens["axis"], tokens["at"]) == ("tokens", 1000.0)
    # 1,000 tokens at 50 and at 25 a second: after 20 s the slower arm has seen 500 tokens.
    assert (seconds["axis"], seconds["at"]) == ("seconds", 20.0)
    assert seconds["losses"] == {"additive": 5.0, "mhar-h1": 4.5}


def test_readings_are_of_the_seeds_that_all_arms_have(fake, tmp_path):
    _losses(fake, {"additive": {0: 5.0, 1: 7.0}, "mhar-h1": {0: 4.0, 1: 6.0}, "mhar-h2": {0: 4.5, 1: 0.0}})
    fake.fails = {"mhar-h2/seed-1": (1, "Error: x")}
    steps = fake.study(tmp_path).comparisons["readings"][0]
    assert (steps["seeds"], steps["losses"]) == ([0], {"additive": 5.0, "mhar-h1": 4.0, "mhar-h2": 4.5})


def test_readings_of_arms_without_a_common_seed_are_of_their_own(fake, tmp_path):
    _losses(fake, {"additive": {0: 5.0, 1: 7.0}, "mhar-h1": {0: 4.0, 1: 6.0}, "mhar-h2": {0: 4.5, 1: 0.0}})
    fake.fails = {"mhar-h1/seed-0": (1, "Error: x"), "mhar-h2/seed-1": (1, "Error: x")}
    steps = fake.study(tmp_path).comparisons["readings"][0]
    assert (steps["seeds"], steps["losses"]) == (None, {"additive": 6.0, "mhar-h1": 6.0, "mhar-h2": 4.5})


def test_a_study_without_a_finished_run_compares_nothing(fake, tmp_path):
    fake.fails = {
        f"additive,learning_rate={rate}/seed-{s}": (1, "Error: x") for rate in ("0.001", "0.003") for s in (0, 1)
    }
    comparisons = fake.study(tmp_path, {**STUDY, "grid": RATES}, only=["additive"]).comparisons
    assert [arm["loss"] for arm in comparisons["arms"]] == [None] * 6
    assert comparisons["best_learning_rates"] == comparisons["readings"] == []


def test_the_table_shows_losses_differences_and_the_unigram_entropy(fake, tmp_path):
    _losses(fake, {"additive": {0: 5.0, 1: 5.2}, "mhar-h1": {0: 4.9, 1: 5.0}})
    fake.fails["mhar-h2/seed-0"] = fake.fails["mhar-h2/seed-1"] = (1, "Error: x")
    result = fake.study(tmp_path)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(comparison_table(result.study, result.comparisons))
    text = console.export_text()
    assert "5.100 ± 0.141" in text
    assert "-0.150 ± 0.050" in text
    assert "unigram entropy" in text
    assert "6.500" in text
    assert "read the sign and the size" in " ".join(text.split())


def test_gains_in_compute_along_a_grid_of_scales(fake, tmp_path):
    lengths = {"length": {"short": {}, "middle": {"training.steps": 40}, "long": {"training.steps": 160}}}
    # L = C^-1/2: four times the steps halve the loss. The arm has the baseline's loss of twice the compute.
    for name, loss in {"short": 4.0, "middle": 2.0, "long": 1.0}.items():
        _losses(fake, {f"additive,length={name}": {0: loss}, f"mhar-h1,length={name}": {0: loss / 2**0.5}})
    study = {**STUDY, "grid": lengths, "compute_gain": True, "seeds": [0]}
    found = fake.study(tmp_path, study, only=["additive", "mhar-h1"]).comparisons["compute_gain"]
    assert "C^-0.5000" in found["fit"]
    assert found["warning"] is None
    assert [row["label"] for row in found["gains"]] == [f"mhar-h1,length={name}" for name in lengths["length"]]
    for row in found["gains"]:
        assert row["gain"] == pytest.approx(2 / (1 + row["routing_share"]))
        assert row["routing_share"] > 0
    assert "compute-equivalent gains" in fake.output
    assert "2 parameters fitted through 2 points" not in fake.output


def test_an_arm_that_is_not_counted_keeps_the_gains_of_the_others(fake, tmp_path, monkeypatch):
    lengths = {"length": {"short": {}, "middle": {"training.steps": 40}, "long": {"training.steps": 160}}}
    for name, loss in {"short": 4.0, "middle": 2.0, "long": 1.0}.items():
        _losses(fake, {f"{arm},length={name}": {0: loss} for arm in ("additive", "mhar-h1", "hyper")})
    arms = {**STUDY["arms"], "hyper": {"residual": {"scheme": "hyper_connections"}}}
    study = {**STUDY, "arms": arms, "grid": lengths, "compute_gain": True, "seeds": [0]}
    monkeypatch.setattr(flops, "_STREAM_SCHEMES", {})
    found = fake.study(tmp_path, study, only=["additive", "mhar-h1", "hyper"]).comparisons["compute_gain"]
    assert [row["label"] for row in found["gains"]] == [f"mhar-h1,length={name}" for name in lengths["length"]]
    assert found["warning"] == (
        "hyper has no gain: the FLOPs of the scheme 'hyper_connections' are not counted in studies/flops.py"
    )


def test_an_arm_that_diverged_keeps_the_gains_of_the_others(fake, tmp_path):
    lengths = {"length": {"short": {}, "middle": {"training.steps": 40}, "long": {"training.steps": 160}}}
    for name, loss in {"short": 4.0, "middle": 2.0, "long": 1.0}.items():
        _losses(fake, {f"{arm},length={name}": {0: loss} for arm in ("additive", "mhar-h1", "mhar-h2")})
    fake.losses["mhar-h1,length=long/seed-0"] = math.nan
    study = {**STUDY, "grid": lengths, "compute_gain": True, "seeds": [0]}
    found = fake.study(tmp_path, study).comparisons["compute_gain"]
    assert [row["label"] for row in found["gains"]].count("mhar-h1,length=long") == 0
    assert len(found["gains"]) == 5
    assert found["warning"].startswith("mhar-h1,length=long has no gain: loss: got nan")


def test_gains_in_compute_say_why_there_are_none(fake, tmp_path):
    lengths = {"length": {"short": {}, "long": {"training.steps": 40}}}
    study = {**STUDY, "grid": lengths, "compute_gain": True, "seeds": [0]}
    fake.fails["additive,length=long/seed-0"] = (1, "Error: x")
    found = fake.study(tmp_path, study).comparisons["compute_gain"]
    assert (found["fit"], found["gains"]) == (None, [])
    assert "a fit wants at least two" in found["warning"]
    fake.fails.clear()
    fake.losses["additive,length=long/seed-0"] = 4.0
    assert "through 2 points" in fake.study(tmp_path, study).comparisons["compute_gain"]["warning"]
