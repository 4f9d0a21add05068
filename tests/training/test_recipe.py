"""Recipes: strict, inherited, overridden; and every shipped one."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from depthroute.training.recipe import differing_keys, load_recipe, make_recipe, recipe_text
from depthroute.training.shipped import find_recipe, recipe_folder

# Studies lie there too, and are tested as studies.
SHIPPED = sorted(
    path.relative_to(recipe_folder()).with_suffix("").as_posix()
    for path in recipe_folder().rglob("*.yaml")
    if "arms" not in yaml.safe_load(path.read_text(encoding="utf-8"))
)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def refusal(*overrides: str) -> str:
    """The message with which a recipe is refused."""
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the tests look at the message
        load_recipe({"name": "a", "residual": {"scheme": "mhar"}}, overrides)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_an_override_of_the_scheme_that_a_recipe_has_by_default_keeps_the_rest_of_it():
    assert load_recipe({"name": "a"}, ["residual.scale=0.5"]).residual == {
        "scheme": "mhar", "num_heads": "kv", "scale": 0.5
    }  # fmt: skip
    assert load_recipe({"name": "a"}, ["residual.scheme=additive"]).residual == {"scheme": "additive"}
    assert load_recipe({"name": "a"}).residual == {"scheme": "mhar", "num_heads": "kv"}


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_recipe_is_valid(name):
    recipe = load_recipe(name)
    assert make_recipe(yaml.safe_load(recipe_text(recipe))) == recipe


@pytest.mark.parametrize("name", [name for name in SHIPPED if name.startswith("paper/")])
def test_paper_recipes_train_as_the_paper_says(name):
    recipe = load_recipe(name)
    optimizer = recipe.optimizer
    assert (optimizer.beta1, optimizer.beta2, optimizer.eps, optimizer.max_grad_norm) == (0.9, 0.95, 1e-8, 1.0)
    assert (optimizer.weight_decay, optimizer.residual_weight_decay, optimizer.decay) == (0.1, 0.1, "all")
    assert (optimizer.warmup_steps, optimizer.schedule, optimizer.min_lr_ratio) == (1000, "cosine", 0.1)
    training = recipe.training
    assert (training.steps, training.evaluate_every, training.tail, training.precision) == (20_000, 500, 11, "bf16")
    assert recipe.model.decoder["vocab_size"] == 151936


def test_paper_recipes_differ_by_scheme_or_by_shape_alone():
    baseline = load_recipe("paper/100m")
    for arm in ("mhar", "single-head", "hyper-connections"):
        changed = differing_keys(baseline, load_recipe(f"paper/100m-{arm}"))
        assert {key.split(".")[0] for key in changed} == {"name", "residual"}
    shapes = {name: load_recipe(f"paper/{name}") for name in ("124m", "350m", "1b")}
    assert {r.data.sequence_length * r.training.batch_size for r in shapes.values()} == {64 * 2048, 32 * 1024}
    assert all(r.residual == {"scheme": "additive"} for r in shapes.values())


def test_defaults_are_written_out_and_read_back():
    recipe = load_recipe({"name": "a"})
    assert load_recipe(yaml.safe_load(recipe_text(recipe))) == recipe
    assert "warmup_steps: 1000" in recipe_text(recipe)


def test_recipes_do_not_change():
    recipe = load_recipe({"name": "a"})
    with pytest.raises(ValidationError, match="frozen"):
        recipe.seed = 1


def test_an_unknown_key_names_the_nearest_right_one_with_its_path():
    assert "'optimizer.lerning_rate'" in refusal("optimizer.lerning_rate=1")
    assert "did you mean 'optimizer.learning_rate'" in refusal("optimizer.lerning_rate=1")
    assert "did you mean 'optimizer.learning_rate'" in refusal("learning_rate=1")  # of another section
    assert "did you mean 'training'" in refusal("trainning.steps=1")
    assert "known here: name, seed, model" in refusal("zzz=1")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("scheme=mhar", "'scheme' in the recipe; did you mean 'residual.scheme'?"),
        ("num_heads=4", "did you mean 'residual.num_heads'?"),
        ("eps=1e-6", "did you mean 'optimizer.eps' or 'residual.eps'?"),
        ("train.steps=3", "did you mean 'training'?"),  # a section, and so not data.train
        ("train=books.txt", "did you mean 'data.train'?"),
        ("residul={scheme: mhar}", "did you mean 'residual'?"),
        ("training.seed=1", "did you mean 'seed'?"),
        ("training.device=cuda", "known here: steps, batch_size, "),
        ("device=cuda", "known here: name, seed, model, residual, "),
        ("lr=1e-3", "did you mean 'optimizer.learning_rate'?"),
        ("optimizer.lr=1e-3", "did you mean 'optimizer.learning_rate'?"),
        ("training.bs=8", "did you mean 'training.batch_size'?"),
    ],
)
def test_an_unknown_key_is_never_explained_by_a_far_one(override, said):
    assert said in refusal(override)


def test_a_study_is_no_recipe():
    with pytest.raises(ValueError, match=r"quickstart\.yaml is a study .* `depthroute study` runs it"):
        load_recipe("quickstart")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer.learning_rate=-1", "optimizer.learning_rate is -1, but should be greater than 0"),
        ("optimizer.learning_rate=fast", "optimizer.learning_rate is 'fast', but should be a number"),
        ("optimizer.learning_rate=.inf", "optimizer.learning_rate is inf, but should be a finite number"),
        ("optimizer.beta2=1.0", "optimizer.beta2 is 1.0, but should be less than 1"),
        ("optimizer.decay=most", "optimizer.decay is 'most', but should be 'all', 'matrices' or 'projections'"),
        ("training.steps=2.5", "training.steps is 2.5, but should be a whole number"),
        ("training.steps=0", "training.steps is 0, but should be greater than or equal to 1"),
        ("optimizer.z_loss=-1", "optimizer.z_loss is -1, but should be greater than or equal to 0"),
        ("training.ema_decay=1", "training.ema_decay is 1, but should be less than 1"),
        ("training.ema_decay=0", "training.ema_decay is 0, but should be greater than 0"),
        ("training.evaluate_first=0", "training.evaluate_first is 0, but should be true or false"),
        ("model.preset=null", "model.preset is None and model.checkpoint is None, but exactly one"),
        ("data.tokenizer=checkpoint", "data.tokenizer is 'checkpoint', but model.checkpoint is null"),
        ("training.compile=1", "training.compile is 1, but should be true or false"),
        (
            "training.cuda_graphs=true",
            "training.cuda_graphs is true, but should be false where training.compile is false",
        ),
        ("training.precision=fp16", "training.precision is 'fp16', but should be 'fp32' or 'bf16'"),
        ("training.report_to=wandb", "training.report_to is 'wandb', but should be a list"),
        ("seed=true", "seed is True, but should be a whole number"),
        ("data.train=3", "data.train is 3, but should be text or a list"),
        ("data.held_out_fraction=1.5", "data.held_out_fraction is 1.5, but should be less than 1"),
        ("optimizer=3", "optimizer is 3, but should be a section"),
        ("model.decoder=4", "model.decoder is 4, but should be a section"),
        ("training.micro_batch_size=7", "training.micro_batch_size is 7, but should divide"),
        ("training.steps=1000", "optimizer.warmup_steps is 1000, but should be less than training.steps = 1000"),
    ],
)
def test_a_wrong_value_says_what_is_wanted(override, said):
    assert refusal(override).startswith(said)


def test_all_wrong_values_are_named_at_once():
    message = refusal("seed=x", "training.steps=0")
    assert "seed is 'x'" in message
    assert "training.steps is 0" in message


def test_a_recipe_needs_a_name():
    with pytest.raises(ValueError, match="name is missing"):
        load_recipe({})


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("residual.scheme=mahr", "mhar"),
        ("residual.num_haeds=2", "num_heads"),
        ("residual.num_heads=3", "must divide"),
        ("model.preset=tinny", "tiny"),
        ("model.decoder.hidden_sise=3", "hidden_size"),
    ],
)
def test_the_model_and_the_scheme_are_checked_on_loading(override, said):
    assert said in refusal(override)


def test_overrides_are_read_as_yaml():
    recipe = load_recipe(
        {"name": "a"},
        [
            "optimizer.learning_rate=5e-4",
            "data.train=[a.jsonl, b.jsonl]",
            "training.num_threads=null",
            "training.compile=true",
            "residual={scheme: additive}",
            "model.decoder.num_hidden_layers=3",
        ],
    )
    assert recipe.optimizer.learning_rate == 5e-4
    assert recipe.data.train == ["a.jsonl", "b.jsonl"]
    assert recipe.training.num_threads is None
    assert recipe.training.compile
    assert recipe.residual == {"scheme": "additive"}
    assert recipe.model.decoder == {"num_hidden_layers": 3}


def test_overrides_may_be_a_mapping_with_dotted_or_nested_keys():
    dotted = load_recipe({"name": "a"}, {"optimizer.beta1": 0.8, "optimizer.beta2": 0.9})
    assert dotted == load_recipe({"name": "a"}, {"optimizer": {"beta1": 0.8, "beta2": 0.9}})
    assert dotted.optimizer.beta1 == 0.8


def test_the_last_override_of_a_key_wins():
    assert load_recipe({"name": "a"}, ["seed=1", "seed=2"]).seed == 2


@pytest.mark.parametrize("override", ["seed", "=3", "optimizer.=3", "seed=[1", "seed=1: 2: 3"])
def test_an_override_that_is_none_is_refused(override):
    assert override in refusal(override)


def test_a_single_text_is_no_list_of_overrides():
    with pytest.raises(TypeError, match="list"):
        load_recipe({"name": "a"}, "seed=1")


def test_another_scheme_replaces_all_keys_of_the_one_below():
    heads = {"name": "a", "residual": {"scheme": "mhar", "num_heads": 2, "scale": 0.5}}
    assert load_recipe(heads, ["residual.scheme=additive"]).residual == {"scheme": "additive"}
    assert load_recipe(heads, ["residual.num_heads=4"]).residual == {"scheme": "mhar", "num_heads": 4, "scale": 0.5}
    both = load_recipe(heads, ["residual.num_heads=4", "residual.scheme=mhar"]).residual
    assert both == {"scheme": "mhar", "num_heads": 4}


def test_a_recipe_holds_only_what_differs_from_its_base(tmp_path):
    (tmp_path / "more").mkdir()
    write(tmp_path / "base.yaml", "name: base\nseed: 3\noptimizer: {beta1: 0.5, beta2: 0.6}\n")
    write(tmp_path / "more/middle.yaml", "base: ../base.yaml\noptimizer: {beta1: 0.7}\n")
    top = write(tmp_path / "more/top.yaml", "base: middle\nname: top\n")
    recipe = load_recipe(top)
    assert (recipe.name, recipe.seed, recipe.optimizer.beta1, recipe.optimizer.beta2) == ("top", 3, 0.7, 0.6)


def test_a_shipped_recipe_can_be_a_base(tmp_path):
    path = write(tmp_path / "mine.yaml", "base: paper/100m\nname: mine\n")
    assert differing_keys(load_recipe(path), load_recipe("paper/100m")) == ["name"]


def test_a_circle_of_bases_is_named(tmp_path):
    write(tmp_path / "a.yaml", "base: b.yaml\n")
    write(tmp_path / "b.yaml", "base: a.yaml\n")
    with pytest.raises(ValueError, match=r"a\.yaml -> .*b\.yaml -> .*a\.yaml is a circle"):
        load_recipe(tmp_path / "a.yaml")


def test_a_missing_base_names_the_file_that_wants_it(tmp_path):
    path = write(tmp_path / "a.yaml", "base: nowhere.yaml\n")
    with pytest.raises(FileNotFoundError, match=r"base of .*a\.yaml: no recipe 'nowhere.yaml'"):
        load_recipe(path)


def test_a_missing_recipe_names_the_nearest_shipped_one():
    with pytest.raises(FileNotFoundError, match="did you mean 'paper/100m'"):
        load_recipe("papr/100m")


def test_what_is_missing_is_looked_for_among_its_own_kind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # out of the checkout, where recipes/ is
    with pytest.raises(FileNotFoundError, match="no recipe '100m'; did you mean 'paper/100m'") as recipe:
        find_recipe("100m")
    assert "studies/main" not in str(recipe.value)
    for name in ("main", "main.yaml", "mian", "recipes/studies/main.yaml"):
        with pytest.raises(FileNotFoundError, match=f"no study '{name}'; did you mean 'studies/main'") as study:
            find_recipe(name, kind="study")
    assert "quickstart" in str(study.value)
    assert "paper" not in str(study.value)
    assert "base/" not in str(study.value)


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("main", "recipe", "no recipe 'main'; did you mean the study 'studies/main', which is for `depthroute study`?"),
        ("mian", "recipe", "did you mean the study 'studies/main'"),
        ("100m", "study", "no study '100m'; did you mean the recipe 'paper/100m', which is for `depthroute train`?"),
        ("mine/mid-training", "study", "did you mean 'studies/mid-training'?"),  # its own kind first
        ("100n", "recipe", "did you mean 'paper/100m'?"),
        ("zzz", "recipe", "no recipe 'zzz' (shipped: "),
    ],
)
def test_a_name_of_the_other_kind_says_whose_it_is(tmp_path, monkeypatch, name, kind, said):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError) as error:
        find_recipe(name, tmp_path, kind=kind)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: [", "line 1"),
        ("- a\n- b\n", "wanted a mapping"),
        ("", "wanted a mapping"),
        ("name: a\nname: b\n", "'name' stands twice"),
        ("name: a\nbase: 3\n", "base is 3"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_in_one_line(tmp_path, text, said):
    path = write(tmp_path / "a.yaml", text)
    with pytest.raises(ValueError, match=said) as error:
        load_recipe(path)
    assert "\n" not in str(error.value)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not a text file"):
        load_recipe(path)


def test_exponents_need_no_dot(tmp_path):
    path = write(tmp_path / "a.yaml", "name: a\noptimizer: {learning_rate: 3e-4, eps: 1E-6}\n")
    optimizer = load_recipe(path).optimizer
    assert (optimizer.learning_rate, optimizer.eps) == (3e-4, 1e-6)


def test_recipes_are_found_without_their_ending_and_beside_a_file_first(tmp_path):
    (tmp_path / "paper").mkdir()
    own = write(tmp_path / "paper/100m.yaml", "name: own\n")
    assert find_recipe("paper/100m", tmp_path) == own
    assert find_recipe("paper/100m") == recipe_folder() / "paper/100m.yaml"


def test_differing_keys_are_dotted():
    recipe = load_recipe({"name": "a"})
    other = load_recipe({"name": "a", "model": {"decoder": {"num_hidden_layers": 1}}}, ["seed=1", "training.tail=2"])
    assert differing_keys(recipe, recipe) == []
    assert set(differing_keys(recipe, other)) == {
        "seed",
        "training.tail",
        "model.decoder",
        "model.decoder.num_hidden_layers",
    }
