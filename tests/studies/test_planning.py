import pytest

from depthroute.models.presets import decoder_config
from depthroute.studies.flops import token_flops
from depthroute.studies.planning import plan
from depthroute.studies.study import load_study, runs, same_run
from depthroute.training.recipe import load_recipe, recipe_folder

from .conftest import STUDY

SHIPPED = sorted((recipe_folder() / "studies").glob("*.yaml"))
FROM_SCRATCH = [path for path in SHIPPED if path.stem != "mid-training"]
FULL_SHAPE = {
    **STUDY,
    "recipe": {
        "model": {"preset": "100m", "decoder": {"vocab_size": 50257}},
        "training": {"steps": 2000, "batch_size": 32},
    },
}


def test_a_plan_counts_runs_tokens_flops_hours_and_disc():
    found = plan(FULL_SHAPE)
    assert found.num_runs == 6
    row = found.rows[0]
    assert (row.label, row.seeds, row.steps, row.tokens) == ("additive", 2, 2000, 2000 * 32 * 2048)
    flops = token_flops(decoder_config("100m", vocab_size=50257), sequence_length=2048)
    assert row.flops == pytest.approx(flops.total * row.tokens)
    assert row.parameters == flops.parameters == 37_763_072 + 50257 * 512
    assert row.disc_bytes == 2 * 4 * row.parameters
    assert found.tokens == 6 * row.tokens
    assert found.hours == pytest.approx(sum(r.hours for r in found.rows))


def test_the_estimate_gives_back_the_two_speeds_that_it_is_made_from():
    additive, mhar, _ = plan(FULL_SHAPE).rows
    assert additive.tokens_per_second == pytest.approx(805_000)
    assert mhar.tokens_per_second == pytest.approx(631_000)
    assert additive.hours == pytest.approx(2 * 2000 * 32 * 2048 / 805_000 / 3600)


def test_a_given_speed_is_used_and_named_as_such():
    found = plan(FULL_SHAPE, tokens_per_second=1e6)
    assert {row.tokens_per_second for row in found.rows} == {1e6}
    assert "Speed: 1,000,000 tokens/s as given." in str(found)
    with pytest.raises(ValueError, match="tokens_per_second: got 0, wants a positive speed"):
        plan(FULL_SHAPE, tokens_per_second=0)


def test_the_table_says_where_an_estimate_comes_from():
    assert "Speed: estimated from two measurements on one H200" in str(plan(FULL_SHAPE))


@pytest.mark.parametrize("path", [*SHIPPED, recipe_folder() / "quickstart.yaml"], ids=lambda path: path.stem)
def test_every_shipped_study_is_dry_run(path):
    found = plan(path)
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
    assert "?: of a checkpoint that is not on this machine" in str(found)
    assert plan(study, tokens_per_second=1e5).hours == pytest.approx(found.tokens / 1e5 / 3600)


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
