"""Models are found in their folders, and go by names that tell them apart."""

from __future__ import annotations

import shutil
from dataclasses import asdict

import pytest
from safetensors.torch import load_file, save_file

from depthroute.evaluation.saved import find_models, load_model

MHAR = {"scheme": "mhar", "num_heads": 2}


@pytest.fixture
def model(save):
    return save("model", MHAR)


@pytest.mark.parametrize(
    ("places", "given", "names"),
    [
        (["saved"], ["saved"], ["saved"]),
        (["run/final"], ["run"], ["run"]),
        (["run/final", "run/final-ema"], ["run", "run/final-ema"], ["run", "run-ema"]),
        (["a/mhar/final", "b/mhar/final"], ["a/mhar", "b/mhar"], ["a-mhar", "b-mhar"]),
        (["a/one", "two"], ["a/one", "two"], ["one", "two"]),
    ],
)
def test_names(places, given, names, model, tmp_path):
    for place in places:
        shutil.copytree(model, tmp_path / place, dirs_exist_ok=True)
    found = find_models([tmp_path / place for place in given])
    assert [one.name for one in found] == names


def test_weights_are_known_by_their_content(model, save, tmp_path):
    shutil.copytree(model, tmp_path / "copy")
    same, other = find_models([tmp_path / "copy", save("other", MHAR, 1)])
    (first,) = find_models([model])
    assert first.weights == same.weights != other.weights
    assert first.max_length == 512


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("config.json", "config"),
        ("generation_config.json", "generation_config"),
        ("tokenizer.json", "tokenizer"),
        ("tokenizer_config.json", "tokenizer"),
        ("special_tokens_map.json", "tokenizer"),  # not there before
        ("README.md", None),
        ("evaluation/evaluation.json", None),
    ],
)
def test_a_changed_file_makes_another_model_of_it_unless_it_is_none_of_the_models(file, kind, model):
    (before,) = find_models([model])
    path = model / file
    path.parent.mkdir(exist_ok=True)
    path.write_text((path.read_text() if path.is_file() else "{}") + "\n")
    (after,) = find_models([model])
    assert {key for key, value in asdict(after).items() if asdict(before)[key] != value} == ({kind} if kind else set())


def test_a_model_without_a_generation_config(model):
    (model / "generation_config.json").unlink()
    assert find_models([model])[0].generation_config is None


def test_a_model_without_weights(model):
    for file in model.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(FileNotFoundError, match="has no weights"):
        find_models([model])


def test_a_model_that_lacks_weights_is_not_scored(model):
    weights = load_file(model / "model.safetensors")
    weights.pop("model.residual.reads.1.query")
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"its weights lack 'model\.residual\.reads\.1\.query'"):
        load_model(find_models([model])[0], batch_size=1, dtype="auto")
