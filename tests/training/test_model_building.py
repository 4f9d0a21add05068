"""From recipes to fresh models."""

from __future__ import annotations

import pytest
import torch
from transformers import set_seed

from depthroute.data import load_tokenizer
from depthroute.residual import available
from depthroute.training.model_building import build_model
from depthroute.training.optim import RESIDUAL_PREFIX
from depthroute.training.pretrained import load_pretrained
from support.models import stock
from support.small_runs import small_recipe

TOKENIZER = load_tokenizer("embedded")


def weights(recipe) -> dict[str, torch.Tensor]:
    set_seed(recipe.seed)
    return build_model(recipe, TOKENIZER).state_dict()


@pytest.mark.parametrize("scheme", [scheme for scheme in available() if scheme != "additive"])
def test_arms_of_one_seed_share_all_other_weights_bit_for_bit(corpus, scheme):
    plain = weights(small_recipe(corpus, "residual.scheme=additive"))
    routed = weights(small_recipe(corpus, f"residual.scheme={scheme}"))
    assert {name for name in routed if not name.startswith(RESIDUAL_PREFIX)} == set(plain)
    assert len(routed) > len(plain)
    assert all(torch.equal(routed[name], value) for name, value in plain.items())


def test_another_seed_gives_other_weights(corpus):
    name = "model.embed_tokens.weight"
    assert not torch.equal(weights(small_recipe(corpus))[name], weights(small_recipe(corpus, "seed=1"))[name])


def test_vocabulary_and_special_tokens_are_the_tokenizers(corpus):
    config = build_model(small_recipe(corpus), TOKENIZER).config
    assert config.vocab_size == len(TOKENIZER)
    assert config.eos_token_id == config.pad_token_id == TOKENIZER.eos_token_id
    assert config.bos_token_id == TOKENIZER.bos_token_id


def test_the_token_between_documents_is_a_word_like_the_others(corpus):
    """The stock module has it start at zero and learn nothing where it is the padding token as well."""
    assert TOKENIZER.pad_token_id == TOKENIZER.eos_token_id
    model = build_model(small_recipe(corpus, "model.decoder.tie_word_embeddings=false"), TOKENIZER)
    rows = model.model.embed_tokens.weight.detach().norm(dim=1)
    assert rows[TOKENIZER.eos_token_id] > 0.5 * rows.mean()
    ids = torch.tensor([[5, TOKENIZER.eos_token_id, 7, 8]])
    model(input_ids=ids, labels=ids).loss.backward()
    assert model.model.embed_tokens.weight.grad[TOKENIZER.eos_token_id].norm() > 0
    assert model.generation_config.pad_token_id == TOKENIZER.pad_token_id


def test_a_checkpoints_padding_token_learns_too(tmp_path):
    end = 3
    stock("llama", pad_token_id=end, eos_token_id=end, tie_word_embeddings=False).save_pretrained(tmp_path)
    model = load_pretrained(str(tmp_path), {"scheme": "mhar", "read_scale": "sum"})
    ids = torch.tensor([[5, end, 7, 8]])
    model(input_ids=ids, labels=ids).loss.backward()
    assert model.model.embed_tokens.weight.grad[end].norm() > 0


def test_the_vocabulary_may_be_larger_but_not_smaller(corpus):
    model = build_model(small_recipe(corpus, "model.decoder.vocab_size=4096"), TOKENIZER)
    assert model.model.embed_tokens.weight.shape[0] == 4096
    with pytest.raises(ValueError, match=r"model\.decoder\.vocab_size is 100, but should be at least"):
        build_model(small_recipe(corpus, "model.decoder.vocab_size=100"), TOKENIZER)


def test_positions_reach_over_the_sequence(corpus):
    model = build_model(small_recipe(corpus, "data.sequence_length=5000"), TOKENIZER)
    assert model.config.max_position_embeddings == 5000
    with pytest.raises(ValueError, match=r"model\.decoder\.max_position_embeddings is 8, but should be at least 16"):
        build_model(small_recipe(corpus, "model.decoder.max_position_embeddings=8"), TOKENIZER)
