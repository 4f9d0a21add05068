import pytest
import yaml

from depthroute.studies.study import load_study, points, runs
from depthroute.training.recipe import load_recipe


def study(**changes):
    """A study of two arms and two seeds; None takes a key away."""
    values = {
        "name": "example",
        "recipe": {"optimizer": {"warmup_steps": 2}, "training": {"steps": 10}},
        "arms": {"additive": {"residual": {"scheme": "additive"}}, "mhar": {"residual": {"scheme": "mhar"}}},
        "baseline": "additive",
        "seeds": [0, 1],
        **changes,
    }
    return {key: value for key, value in values.items() if value is not None}


def planned(**changes):
    return runs(load_study(study(**changes)))


def test_runs_are_arms_by_seeds_with_whole_comparisons_first():
    found = planned()
    assert [run.name for run in found] == ["additive/seed-0", "mhar/seed-0", "additive/seed-1", "mhar/seed-1"]
    assert [run.recipe.residual["scheme"] for run in found] == ["additive", "mhar", "additive", "mhar"]
    assert [run.recipe.seed for run in found] == [0, 0, 1, 1]
    assert {run.recipe.training.steps for run in found} == {10}
    assert found[1].recipe.name == "example-mhar"


def test_runs_of_one_seed_differ_in_what_their_arms_say_alone():
    additive, mhar = planned()[:2]
    same = additive.recipe.model_copy(update={"name": mhar.recipe.name, "residual": mhar.recipe.residual})
    assert same == mhar.recipe


def test_a_grid_is_crossed_with_the_arms():
    found = planned(seeds=[3], grid={"optimizer.learning_rate": [1e-3, 1e-4], "model.preset": ["tiny", "100m"]})
    assert len(found) == 8
    assert found[-1].label == "mhar,learning_rate=0.0001,preset=100m"
    assert found[-1].point == {"optimizer.learning_rate": 1e-4, "model.preset": "100m"}
    assert found[-1].recipe.optimizer.learning_rate == 1e-4
    assert found[-1].recipe.model.preset == "100m"


def test_a_named_value_changes_several_keys_its_base_and_single_arms(tmp_path):
    (tmp_path / "long.yaml").write_text(yaml.safe_dump({"name": "long", "optimizer": {"warmup_steps": 5}}))
    path = tmp_path / "study.yaml"
    grid = {
        "size": {
            "small": {},
            "wide": {
                "base": "long",
                "model.decoder": {"hidden_size": 256},
                "training": {"batch_size": 8},
                "arms": {"mhar": {"residual.scale": 0.5}},
            },
        }
    }
    path.write_text(yaml.safe_dump(study(recipe={"training": {"steps": 2000}}, seeds=[0], grid=grid)))
    found = {run.label: run.recipe for run in runs(load_study(path))}
    assert list(found) == ["additive,size=small", "mhar,size=small", "additive,size=wide", "mhar,size=wide"]
    assert found["mhar,size=small"] == load_recipe(
        {"name": "example-mhar,size=small", "training": {"steps": 2000}, "residual": {"scheme": "mhar"}}
    )
    wide = found["mhar,size=wide"]
    assert wide.model.decoder == {"hidden_size": 256}
    assert (wide.training.batch_size, wide.training.steps, wide.optimizer.warmup_steps) == (8, 2000, 5)
    assert wide.residual == {"scheme": "mhar", "scale": 0.5}
    assert "scale" not in found["additive,size=wide"].residual


def test_an_axis_may_lie_within_the_residual():
    arms = {"additive": {"training.batch_size": 8}, "mhar": {"training.batch_size": 16}}
    found = planned(
        recipe={"optimizer.warmup_steps": 2, "training.steps": 10, "residual": {"scheme": "mhar"}},
        arms=arms,
        seeds=[0],
        grid={"residual.num_heads": [1, 2]},
    )
    assert [run.recipe.residual for run in found[::2]] == [{"scheme": "mhar", "num_heads": h} for h in (1, 2)]


def test_an_arm_may_have_seeds_of_its_own():
    assert [run.name for run in planned(arm_seeds={"mhar": [1]})] == [
        "additive/seed-0",
        "additive/seed-1",
        "mhar/seed-1",
    ]


def test_nested_and_dotted_overrides_are_the_same():
    nested = planned(arms={"additive": {}, "mhar": {"optimizer": {"beta1": 0.8}, "residual": {"scheme": "mhar"}}})
    dotted = planned(arms={"additive": {}, "mhar": {"optimizer.beta1": 0.8, "residual.scheme": "mhar"}})
    assert [run.recipe for run in nested] == [run.recipe for run in dotted]


def test_overrides_change_what_all_runs_share_and_arms_come_after_them():
    given = ["training.steps=20", "training.batch_size=4", "data.train=[a.txt, b.txt]"]
    arms = {"additive": {"residual": {"scheme": "additive"}}, "mhar": {"training.batch_size": 2}}
    found = runs(load_study(study(arms=arms), given))
    assert {run.recipe.training.steps for run in found} == {20}
    assert [run.recipe.training.batch_size for run in found[:2]] == [4, 2]
    assert found[0].recipe.data.train == ["a.txt", "b.txt"]


def test_a_recipe_may_be_a_file_beside_the_study(tmp_path):
    (tmp_path / "base.yaml").write_text(yaml.safe_dump({"name": "base", "training": {"steps": 1234}}))
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study(recipe="base.yaml")))
    assert {run.recipe.training.steps for run in runs(load_study(tmp_path / "study.yaml"))} == {1234}


def test_points_of_no_grid_are_one():
    assert points(load_study(study())) == [{}]


ADDITIVE = {"residual": {"scheme": "additive"}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"baseline": "aditive"}, "baseline: 'aditive' is not an arm; did you mean 'additive'?"),
        ({"arm_seeds": {"mahr": [0]}}, "arm_seeds: 'mahr' is not an arm; did you mean 'mhar'?"),
        (
            {"grid": {"width": {"w": {"arms": {"mahr": {}}}}}},
            "grid.width.w.arms: 'mahr' is not an arm; did you mean 'mhar'?",
        ),
        ({"seed": [0]}, "unknown key 'seed' in the study; did you mean 'seeds'?"),
        ({"arms": None}, "arms is missing in the study"),
        ({"seeds": "all"}, "seeds is 'all': input should be a valid list"),
        ({"seeds": []}, "seeds: got [], wants at least one seed and each of them once"),
        ({"seeds": [0, 0]}, "seeds: got [0, 0], wants at least one seed and each of them once"),
        ({"arms": {}}, "arms: got [], wants at least two arms, since a study pairs their runs"),
        ({"arms": {"additive": ADDITIVE}}, "arms: got ['additive'], wants at least two arms"),
        ({"recipe": 3}, "recipe is 3, wants the name of a recipe or a mapping"),
        ({"grid": {"optimizer.beta1": 0.9}}, "grid.optimizer.beta1 is 0.9, wants a list of values or a mapping"),
        ({"grid": {1.5: [0.9]}}, "grid.1.5.[key] is 1.5: input should be a valid string"),
        ({"grid": {"size": {"small": None}}}, "grid.size is {'small': None}, wants a list of values or a mapping"),
        ({"grid": {"size": {"small": {"arms": None}}}}, "grid.size.small.arms is None, wants arms and the keys"),
        ({"grid": {"size": {"small": {"arms": {"mhar": 3}}}}}, "grid.size.small.arms.mhar is 3, wants keys"),
        ({"arm_seeds": {"mhar": [7]}}, "arm 'mhar' runs seeds [7] and the baseline [0, 1], so nothing is paired"),
        ({"grid": {"optimizer.beta1": []}}, "grid.optimizer.beta1: got [], wants at least one value"),
        ({"grid": {"optimizer.beta1": [0.9, 0.9]}}, "wants at least one value and each of them once"),
        ({"grid": {"seed": [0, 1]}}, "grid.seed: seed is no axis"),
        ({"arms": {"additive": {}, "a/b": {}}}, "arms: 'a/b' names a folder"),
        ({"arms": {"additive": {}, "b": {"seed": 3}}}, "arms.b: sets 'seed', which the study sets"),
        ({"arms": {"additive": {}, "b": {"data": {"train": "x"}}}}, "arms.b: sets 'data.train', but arms share"),
        (
            {"arms": {"additive": {}, "b": {"optimizer.beta1": 0.8}}, "grid": {"optimizer.beta1": [0.9]}},
            "arms.b: sets 'optimizer.beta1', which is an axis of the grid",
        ),
        ({"arms": {"additive": {}, "b": {}}}, "additive/seed-0 and b/seed-0 are the same run"),
        ({"grid": {"data.train": ["data/a", "data_a"]}}, "two points have runs/additive,train=data_a/seed-0 for their"),
        ({"grid": {"optimiser.beta1": [0.9]}}, "additive,beta1=0.9: unknown key 'optimiser'"),
        (
            {"arms": {"additive": {}, "b": {"residual": {"scheme": "mhat"}}}},
            "b: residual.scheme: unknown scheme 'mhat'",
        ),
        ({"recipe": {"training.stepz": 3}}, "additive: unknown key 'training.stepz'"),
    ],
)
def test_a_wrong_study_is_one_clear_error(changes, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        planned(**changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_recipe_is_no_study():
    with pytest.raises(ValueError, match=r"100m\.yaml is a recipe .* `depthroute train` runs it"):
        load_study("paper/100m")


def test_missing_files_are_named():
    with pytest.raises(FileNotFoundError, match="studies/mian"):
        load_study("studies/mian")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        planned(recipe="nowhere.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("training.steps", "override 'training.steps' should look like section.key=value"),
        ("optimizer.beta1=0.5", "override 'optimizer.beta1=0.5': optimizer.beta1 is an axis of the grid"),
        ("training.stepz=3", "unknown key 'training.stepz'"),
    ],
)
def test_a_wrong_override_is_one_clear_error(text, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        runs(load_study(study(grid={"optimizer.beta1": [0.9]}), [text]))
    assert message in str(caught.value)
