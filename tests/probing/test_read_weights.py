"""Mean read weights against constructed schemes with known weights, and on real ones."""

from __future__ import annotations

import gc
import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from depthroute.probing import mean_read_weights
from depthroute.residual import available
from support.models import move_off_init, routed, tokens


class KnownRead(nn.Module):
    """A read of two sources by two heads whose weights follow from the token: id t gives the first source t / 10."""

    num_heads = 2

    def weights(self, sources):
        first = sources[0][..., 0]  # the token ids
        head_0, head_1 = first / 10, 1 - first / 10
        return torch.stack([torch.stack([head_0, head_1], -1), torch.stack([1 - head_0, 1 - head_1], -1)])


class KnownScheme(nn.Module):
    """One layer; site 0 does not read, site 1 and the final site do."""

    num_sites = 3

    def __init__(self):
        super().__init__()
        self.known = KnownRead()
        self.anchor = nn.Parameter(torch.zeros(1))

    def site_read(self, state, site):
        return None if site == 0 else (self.known, (state[0], state[0]))

    def source_names(self, site):
        return ("embedding", f"mlp {site}")

    def read(self, state, site, norm):
        return state[0], state

    def finish(self, state):
        return state[0]


class KnownModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = KnownDecoder()


class KnownDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.residual = KnownScheme()

    def forward(self, input_ids, attention_mask, use_cache):
        assert not self.training
        assert not use_cache
        state = (input_ids[..., None].float(),)
        for site in range(2):
            self.residual.read(state, site, None)
        self.residual.finish(state)
        return SimpleNamespace()


def test_known_weights_are_averaged_over_the_tokens_of_all_batches():
    batches = [torch.tensor([[0, 10], [5, 5]]), torch.tensor([[1, 2, 3]])]
    mean = (0 + 10 + 5 + 5 + 1 + 2 + 3) / 70
    sites = mean_read_weights(KnownModel(), batches)
    assert [(site["site"], site["name"]) for site in sites] == [(1, "mlp 0"), (2, "final")]
    for site in sites:
        assert site["tokens"] == 7
        assert site["sources"] == ["embedding", f"mlp {site['site']}"]
        torch.testing.assert_close(torch.tensor(site["weights"]), torch.tensor([[mean, 1 - mean], [1 - mean, mean]]))


def test_masked_tokens_are_not_counted():
    batch = {"input_ids": torch.tensor([[9, 9, 4, 6]]), "attention_mask": torch.tensor([[0, 0, 1, 1]])}
    (site, _) = mean_read_weights(KnownModel(), [batch])
    assert site["tokens"] == 2
    assert site["weights"][0] == pytest.approx([0.5, 0.5])


def test_left_padding_does_not_change_the_weights_of_a_real_model():
    model, ids = move_off_init(routed({"scheme": "mhar", "num_heads": 2})), tokens(batch=1)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], 1)
    mask = (torch.arange(padded.shape[1]) >= 4).long()[None]
    alone = mean_read_weights(model, [ids])
    with_padding = mean_read_weights(model, [{"input_ids": padded, "attention_mask": mask}])
    for left, right in zip(alone, with_padding, strict=True):
        torch.testing.assert_close(torch.tensor(left["weights"]), torch.tensor(right["weights"]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scheme", ["mhar", "block_mhar"])
def test_fresh_queries_read_all_sources_alike(scheme):
    sites = mean_read_weights(routed({"scheme": scheme, "num_heads": 2}), [tokens()])
    assert sites[-1]["name"] == "final"
    for site in sites:
        n = len(site["sources"])
        torch.testing.assert_close(torch.tensor(site["weights"]), torch.full((2, n), 1 / n))


def test_permuting_the_heads_permutes_the_maps():
    """The slices of queries and sources change places, in a model whose sublayers are cut off: so do the maps."""
    order = torch.tensor([1, 0])
    model = move_off_init(routed({"scheme": "mhar", "num_heads": 2}))
    with torch.no_grad():
        for layer in model.model.layers:  # sublayers that say nothing: every source but the embedding is zero
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    before = mean_read_weights(model, [tokens()])
    with torch.no_grad():
        for parameter in (model.model.embed_tokens.weight, *model.model.residual.parameters()):
            parameter.copy_(parameter.unflatten(-1, (2, -1))[..., order, :].flatten(-2))
    after = mean_read_weights(model, [tokens()])
    for left, right in zip(before, after, strict=True):
        assert left["weights"][0] != pytest.approx(left["weights"][1], rel=1e-3)
        torch.testing.assert_close(torch.tensor(left["weights"])[order], torch.tensor(right["weights"]))


@pytest.mark.parametrize("scheme", available())
def test_every_scheme_gives_rows_that_sum_to_one_or_nothing(scheme):
    model = move_off_init(routed({"scheme": scheme}))
    sites = mean_read_weights(model, [tokens(), tokens(batch=1, length=5)])
    reads = any(model.model.residual.source_names(site) for site in range(model.model.residual.num_sites))
    assert bool(sites) == reads
    for site in sites:
        weights = torch.tensor(site["weights"])
        assert weights.shape[1] == len(site["sources"])
        torch.testing.assert_close(weights.sum(1), torch.ones(len(weights)))
    assert json.loads(json.dumps(sites)) == sites


def test_a_scheme_without_reads_does_not_run_through_the_text():
    batches = iter([tokens(), tokens(), tokens()])
    assert mean_read_weights(routed({"scheme": "additive"}), batches) == []
    assert len(list(batches)) == 2


def test_batches_weigh_by_their_tokens():
    model, ids = move_off_init(routed({"scheme": "mhar"})), tokens(batch=4)
    whole = mean_read_weights(model, [ids])
    parts = mean_read_weights(model, (ids[i : i + n] for i, n in ((0, 3), (3, 1))))
    for left, right in zip(whole, parts, strict=True):
        torch.testing.assert_close(torch.tensor(left["weights"]), torch.tensor(right["weights"]))


def test_the_model_stays_as_it_was():
    model = routed({"scheme": "mhar"}).train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    mean_read_weights(model, [tokens()])
    assert [module.training for module in model.modules()] == modes
    assert not any(parameter.grad is not None for parameter in model.parameters())


def test_memory_does_not_grow_with_the_text():
    """Between batches nothing stays but one small sum for each site."""
    model = routed({"scheme": "mhar"})
    sizes = []

    def batches():
        for _ in range(4):
            yield tokens(batch=1, length=8)
            sizes.append(live_tensor_elements())

    mean_read_weights(model, batches())
    assert len(set(sizes)) == 1


def live_tensor_elements():
    gc.collect()
    return sum(found.numel() for found in gc.get_objects() if type(found) is torch.Tensor)


def test_no_batch_is_an_error_that_says_so():
    with pytest.raises(ValueError, match="batches: there is no token"):
        mean_read_weights(routed({"scheme": "mhar"}), [])
