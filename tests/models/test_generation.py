"""Generation through the library's own `generate`, for every scheme."""

from __future__ import annotations

import pytest
import torch

from depthroute import residual as schemes
from support.models import move_off_init, routed, tokens

pytestmark = pytest.mark.compat
OPTIONS = {
    "max_new_tokens": 6,
    "do_sample": False,
    "eos_token_id": None,
    "return_dict_in_generate": True,
    "output_logits": True,
}


@pytest.fixture(params=schemes.available())
def model(request):
    return move_off_init(routed({"scheme": request.param}))


def test_with_and_without_a_cache_the_same_text(model):
    ids = tokens(length=5)
    cached, full = (model.generate(ids, **OPTIONS, use_cache=use) for use in (True, False))
    assert torch.equal(cached.sequences, full.sequences)
    torch.testing.assert_close(torch.stack(cached.logits), torch.stack(full.logits), rtol=1e-4, atol=1e-4)


def test_with_a_static_cache_the_same_text(model):
    ids = tokens(length=5)
    static = model.generate(ids, **OPTIONS, cache_implementation="static", disable_compile=True)
    assert torch.equal(static.sequences, model.generate(ids, **OPTIONS).sequences)


def test_a_batch_padded_on_the_left_gives_what_each_prompt_gives_alone(model):
    prompts = [tokens(1, length, seed=length)[0] for length in (3, 7, 5)]
    width = max(map(len, prompts))
    ids = torch.stack([torch.cat([torch.zeros(width - len(p), dtype=torch.long), p]) for p in prompts])
    mask = torch.stack([(torch.arange(width) >= width - len(p)).long() for p in prompts])
    together = model.generate(ids, attention_mask=mask, **OPTIONS)
    for row, prompt in enumerate(prompts):
        alone = model.generate(prompt[None], attention_mask=torch.ones(1, len(prompt), dtype=torch.long), **OPTIONS)
        assert torch.equal(together.sequences[row, width:], alone.sequences[0, len(prompt) :])
        logits = torch.stack(together.logits)[:, row]
        torch.testing.assert_close(logits, torch.stack(alone.logits)[:, 0], rtol=1e-4, atol=1e-4)


def test_beams(model):
    ids = tokens(length=5)
    cached, full = (model.generate(ids, **OPTIONS, num_beams=3, use_cache=use) for use in (True, False))
    assert torch.equal(cached.sequences, full.sequences)


def test_a_sliding_window():
    model = move_off_init(routed({"scheme": "mhar"}, "mistral", sliding_window=4))
    ids = tokens(length=9)
    cached, full = (model.generate(ids, **OPTIONS, use_cache=use) for use in (True, False))
    assert torch.equal(cached.sequences, full.sequences)
