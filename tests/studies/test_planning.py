import json
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from depthroute import residual
from depthroute.models.presets import decoder_config
from depthroute.studies.flops import token_flops
from depthroute.studies.planning import (
    ADDITIVE_TOKENS_PER_SECOND,
    HEADS_TOKENS_PER_SECOND,
    ONE_HEAD_TOKENS_PER_SECOND,
    RECORD,
    plan,
)
from depthroute.studies.study import load_study, runs, same_run
from depthroute.training.recipe import load_recipe
from depthroute.training.shipped import recipe_folder

from .conftest import STUDY

SHIPPED = sorted((recipe_folder() / "studies").glob("*.yaml"))
FROM_SCRATCH = [path for path in SHIPPED if path.stem != "mid-training"]
ROOT = Path(__file__).parents[2]
ROW = re.compile(r"\| `(studies/\S+)` \|.*\| (\d+) \| (\S+) B \| (\S+) \|")
PLANNED = ROW.findall((ROOT / "docs/reproduce.md").read_text())
FULL_SHAPE = {
    **STUDY,
    "recipe": {
        "model": {"preset": "100m", "decoder": {"vocab_size": 50304}},
        "training": {"steps": 2000, "batch_size": 32},
    },
}

shipped_plan = cache(plan)


@pytest.fixture
def scaled(monkeypatch):
    """The scheme of docs/add-a-scheme.md, registered: its FLOPs are not counted. It has a number for each sublayer."""
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs/add-a-scheme.md").read_text(), re.DOTALL)
    module = ModuleType("depthroute.residual.scaled")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(code[1], module.__dict__)
    monkeypatch.setitem(residual._SCHEMES, "scaled", module.Scaled)


def text(found):
    """A plan's text with its lines joined."""
    return " ".join(str(found).split())


def test_a_plan_counts_runs_tokens_flops_hours_and_disc():
    found = plan(FULL_SHAPE)
    assert found.num_runs == 6
    row = found.rows[0]
    assert (row.label, row.seeds, row.steps, row.tokens) == ("additive", 2, 2000, 2000 * 32 * 2048)
    flops = token_flops(decoder_config("100m", vocab_size=50304), sequence_length=2048)
    assert row.flops == pytest.approx(flops.total * row.tokens)
    assert row.parameters == flops.parameters == 37_763_072 + 50304 * 512
    assert row.disc_bytes == 2 * 4 * row.parameters
    assert found.tokens == 6 * row.tokens
    assert found.hours == pytest.approx(sum(r.hours for r in found.rows))


def test_the_estimate_gives_back_the_three_speeds_that_it_is_made_from():
    additive, one_head, heads = plan(FULL_SHAPE).rows
    assert additive.tokens_per_second == pytest.approx(ADDITIVE_TOKENS_PER_SECOND)
    assert one_head.tokens_per_second == pytest.approx(ONE_HEAD_TOKENS_PER_SECOND)
    assert heads.tokens_per_second == pytest.approx(HEADS_TOKENS_PER_SECOND)
    assert additive.hours == pytest.approx(2 * 2000 * 32 * 2048 / ADDITIVE_TOKENS_PER_SECOND / 3600)


def test_these_speeds_are_the_record_s():
    arms = {
        "additive": ADDITIVE_TOKENS_PER_SECOND,
        "mhar-h1": ONE_HEAD_TOKENS_PER_SECOND,
        "mhar-h4": HEADS_TOKENS_PER_SECOND,
    }
    for arm, speed in arms.items():
        summary = json.loads((ROOT / RECORD / "results/runs" / arm / "seed-1/summary.json").read_text())
        assert round(summary["tokens_per_second"]) == speed


@pytest.mark.parametrize(("name", "num_runs", "tokens", "hours"), PLANNED, ids=[row[0] for row in PLANNED])
def test_the_table_of_the_docs_is_that_of_the_dry_runs(name, num_runs, tokens, hours):
    found = shipped_plan(recipe_folder() / f"{name}.yaml")
    assert (str(found.num_runs), f"{found.tokens / 1e9:.1f}") == (num_runs, tokens)
    assert f"{found.hours:.{len(hours.partition('.')[2])}f}" == hours


def test_the_docs_plan_every_study_from_scratch():
    assert {Path(row[0]).stem for row in PLANNED} == {path.stem for path in FROM_SCRATCH}


def test_a_given_speed_is_used_and_named_as_such():
    found = plan(FULL_SHAPE, rate=1e6)
    assert {row.tokens_per_second for row in found.rows} == {1e6}
    assert "Speed: 1,000,000 tokens/s as given." in str(found)
    with pytest.raises(ValueError, match="rate: got 0, wants a positive number of tokens a second"):
        plan(FULL_SHAPE, rate=0)


def test_the_table_says_where_an_estimate_comes_from():
    assert "Speed: estimated from three measurements on one H200" in str(plan(FULL_SHAPE))
    assert f"the hours are of one H200 and not of this machine ({RECORD}" in text(plan(FULL_SHAPE))


def test_a_scheme_that_is_not_counted_lacks_its_flops_alone(scaled):
    arms = {**STUDY["arms"], "scaled": {"residual": {"scheme": "scaled"}}}
    without, found = plan(FULL_SHAPE), plan({**FULL_SHAPE, "arms": arms})
    row = found.rows[-1]
    assert row.parameters == without.rows[0].parameters + 24
    assert row.disc_bytes == 2 * 4 * row.parameters
    assert (row.flops, row.tokens_per_second, row.hours) == (None, None, None)
    assert (found.flops, found.hours) == (without.flops, without.hours)
    assert found.disc_bytes == without.disc_bytes + row.disc_bytes
    totals = f"{without.flops:.2e} FLOPs (without scaled) and {without.hours:.1f} GPU hours (without scaled)"
    assert totals in text(found)
    assert "?: the FLOPs of the scheme 'scaled' are not counted in studies/flops.py (scaled)." in text(found)
    assert "checkpoint " not in text(found)
    timed = plan({**FULL_SHAPE, "arms": arms}, rate=1e6)
    assert timed.hours == pytest.approx(timed.tokens / 1e6 / 3600)
    assert f"FLOPs (without scaled) and {timed.hours:.1f} GPU hours of training" in text(timed)


def test_totals_without_many_rows_tell_their_number(scaled):
    grid = {"optimizer.beta1": [0.5, 0.6, 0.7, 0.8]}
    arms = {"additive": {"residual": {"scheme": "additive"}}, "scaled": {"residual": {"scheme": "scaled"}}}
    assert "FLOPs (without 4 of the 8 rows)" in text(plan({**STUDY, "arms": arms, "grid": grid}))


def test_names_of_arms_stand_whole_away_from_a_terminal():
    grid = {"length": {"under-trained": {}, "a-good-deal-longer-than-any-terminal-is-wide" * 3: {"training.steps": 20}}}
    found = plan({**STUDY, "grid": grid})
    assert all(f"│ {row.label} " in str(found) for row in found.rows)
    assert "…" not in str(found)


def test_names_of_arms_are_not_cut_on_a_terminal_either(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    found = str(plan({**STUDY, "grid": {"length": {"a-good-deal-longer" * 5: {}}}}))
    assert "…" not in found
    assert max(map(len, found.splitlines())) <= 120


def test_a_plan_shows_the_chosen_arms_alone():
    found = plan(STUDY, only=["mhar-h2", "additive"])
    assert [row.label for row in found.rows] == ["additive", "mhar-h2"]
    assert "example: 4 runs" in str(found)


def test_a_plan_refuses_what_the_study_would(tmp_path):
    with pytest.raises(ValueError, match="only: 'mhar-h3' is not an arm of the study; did you mean 'mhar-h"):
        plan(STUDY, only=["mhar-h3"])
    with pytest.raises(ValueError, match="workers: got 0, wants at least 1"):
        plan(STUDY, workers=0)
    with pytest.raises(FileNotFoundError, match=r"reuse: .*nothing is not a study folder"):
        plan(STUDY, reuse=[tmp_path / "nothing"])
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"out is .*file"):
        plan(STUDY, out=tmp_path / "file")
    assert plan(STUDY, workers=1, out=tmp_path / "new").num_runs == 6
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_plan_for_the_folder_of_another_study_is_refused(fake, tmp_path):
    fake.study(tmp_path)
    with pytest.raises(ValueError, match=r"holds a run of another recipe \(training.steps differ\)"):
        plan(STUDY, overrides=["training.steps=20"], out=tmp_path)
    assert plan(STUDY, out=tmp_path, reuse=[tmp_path]).num_runs == 6


@pytest.mark.parametrize("path", [*SHIPPED, recipe_folder() / "quickstart.yaml"], ids=lambda path: path.stem)
def test_every_shipped_study_is_dry_run(path):
    found = shipped_plan(path)
    assert found.num_runs == sum(row.seeds for row in found.rows) > 1
    assert found.tokens > 0
    assert (found.hours > 0) == all(row.counted for row in found.rows)
    assert found.name in str(found)


@pytest.mark.parametrize("path", FROM_SCRATCH, ids=lambda path: path.stem)
def test_every_study_from_scratch_decays_all_and_has_the_temperature_control(path):
    """`mhar` with one head at the temperature 1 / sqrt(H) of H = KV (of two, where there is one KV head)."""
    recipes = [(run.arm, run.recipe) for run in runs(load_study(path))]
    for _, recipe in recipes:
        assert recipe.optimizer.residual_weight_decay == recipe.optimizer.weight_decay == 0.1
        assert recipe.optimizer.decay == "all"
    controls = [recipe for arm, recipe in recipes if arm == "mhar-h1-scaled"]
    assert controls
    for recipe in controls:
        heads = decoder_config(recipe.model.preset, **recipe.model.decoder).num_key_value_heads
        assert recipe.residual["num_heads"] == 1
        assert recipe.residual["scale"] == pytest.approx(max(heads, 2) ** -0.5)


def test_a_checkpoint_that_is_not_here_is_planned_without_what_only_it_knows():
    arms = {"control": {"residual": {"scheme": "additive"}}, "gated": {"residual": {"scheme": "delta_mhar"}}}
    shared = {"model": {"checkpoint": "nobody/nothing"}, "data.tokenizer": "checkpoint", "training.steps": 2000}
    study = {**STUDY, "arms": arms, "baseline": "control", "recipe": shared}
    found = plan(study)
    assert [row.counted for row in found.rows] == [False, False]
    assert found.hours == 0
    assert "? FLOPs and ? GPU hours of training" in text(found)
    assert "?: model.checkpoint 'nobody/nothing' is no folder on this machine (control, gated)." in text(found)
    assert "Speed:" not in str(found)
    assert plan(study, rate=1e5).hours == pytest.approx(found.tokens / 1e5 / 3600)


def test_every_shipped_study_says_what_it_is_for():
    assert {path.stem for path in SHIPPED} >= {"main", "learning-rates", "seeds", "heads-by-kv", "heads", "width"}
    assert all(load_study(path).description for path in SHIPPED)
    assert all(load_study(path).name == path.stem for path in SHIPPED)


@pytest.mark.parametrize("path", sorted((recipe_folder() / "studies/base").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_base_of_a_study_is_a_recipe(path):
    recipe = load_recipe(path)
    assert recipe.optimizer.residual_weight_decay == recipe.optimizer.weight_decay == 0.1


def test_study_b_takes_its_runs_at_512_from_study_a():
    of_a = {same_run(run.recipe) for run in runs(load_study("studies/study-a"))}
    of_b = [run for run in runs(load_study("studies/study-b")) if run.point == {"width": "d512"}]
    assert len(of_b) == 8
    assert all(same_run(run.recipe) in of_a for run in of_b)
