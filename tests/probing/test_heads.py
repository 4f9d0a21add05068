"""Head maps on models with known answers, and against plain mean weights on real ones."""

from __future__ import annotations

import gc
import json
import math

import pytest
import torch

from depthroute.probing import head_maps, mean_read_weights
from support.models import move_off_init, routed, tokens

MULTI = {
    "mhar": {"scheme": "mhar", "num_heads": 4},
    "block_mhar": {"scheme": "block_mhar", "num_heads": 2, "block_layers": 2},
    "delta_mhar": {"scheme": "delta_mhar", "num_heads": 2, "block_layers": 1},
}
TOKEN = torch.zeros(1, 3, dtype=torch.long)
# Token 0 stands for two sources that two heads tell apart; token 1 for the same two, exchanged.
TWO = [[[1, 1, 0, 0], [0, 0, 1, 1]], [[0, 0, 1, 1], [1, 1, 0, 0]]]


def multi(scheme="mhar", std=0.3):
    return move_off_init(routed(MULTI[scheme]), std=std)


def test_two_heads_that_want_two_sources_give_the_closed_form(given):
    found = head_maps(given([0.7] * 4, TWO, num_heads=2), [TOKEN, TOKEN])
    p = 1 / (1 + math.exp(-1.4 * math.sqrt(2)))
    (site,) = found["sites"]
    assert [value for row in site["weights"] for value in row] == pytest.approx([p, 1 - p, 1 - p, p])
    assert [value for row in site["deviation"] for value in row] == pytest.approx([p - 0.5, 0.5 - p, 0.5 - p, p - 0.5])
    entropy = -p * math.log(p) - (1 - p) * math.log(1 - p)
    assert site["entropy"] == pytest.approx([entropy, entropy])
    assert site["relative_entropy"] == pytest.approx(entropy / math.log(2))
    assert found["deviation"]["largest"]["largest"] == pytest.approx(p - 0.5)
    assert found["deviation"]["between_heads"]["r"] == pytest.approx(-1.0)
    assert found["deviation"]["between_heads"]["by_centring"] == -1.0
    assert [(s["source"], s["sites"]) for s in found["sources"]] == [("source 0", 1), ("source 1", 1)]
    assert [s["mean_weight"] for s in found["sources"]] == pytest.approx([0.5, 0.5])
    assert [s["relative_weight"] for s in found["sources"]] == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize(("other", "r"), [(0, 1.0), (1, -1.0)])
def test_split_half_correlation_is_one_on_like_text_and_minus_one_on_opposite_text(given, other, r):
    first = {"input_ids": TOKEN, "half": torch.tensor([0])}
    second = {"input_ids": TOKEN + other, "half": torch.tensor([1])}
    found = head_maps(given([0.7] * 4, TWO, num_heads=2), [first, second, first])
    assert found["tokens_by_half"] == [6, 3]
    assert found["deviation"]["split_half"]["r"] == pytest.approx(r)
    assert found["deviation"]["split_half"]["null"] == pytest.approx(r)
    assert found["sites"][0]["split_half"] == pytest.approx(r)


def test_sequences_belong_to_the_halves_in_turn_across_batches(given):
    model = given([0.7] * 4, TWO, num_heads=2)
    found = head_maps(model, [torch.tensor([[0], [1], [0]]), torch.tensor([[1]])])
    assert found["tokens_by_half"] == [2, 2]
    assert found["deviation"]["split_half"]["r"] == pytest.approx(-1.0)


def test_a_text_of_one_half_has_no_split(given):
    found = head_maps(given([0.7] * 4, TWO, num_heads=2), [TOKEN])
    assert found["tokens_by_half"] == [3, 0]
    assert found["deviation"]["split_half"] == {"r": None, "null": None}


@pytest.mark.parametrize("scheme", ["mhar", "block_mhar"])
def test_fresh_queries_read_evenly_and_do_not_deviate(scheme):
    found = head_maps(routed(MULTI[scheme]), [tokens()])
    assert found["relative_entropy"] == pytest.approx(1.0)
    assert all(source["relative_weight"] == pytest.approx(1.0) for source in found["sources"])
    assert found["deviation"]["largest"]["largest"] == 0.0
    assert found["deviation"]["split_half"]["r"] is None
    assert found["deviation"]["between_heads"]["r"] is None


def test_random_queries_give_the_null():
    model = move_off_init(routed(MULTI["mhar"]))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for read in model.model.residual.reads:
            read.query.copy_(torch.randn(read.query.shape, generator=generator) * 0.2)
    found = head_maps(model, [tokens(batch=4, length=32)], draws=16)["deviation"]
    assert found["largest"]["null"] > 0.01
    assert abs(found["largest"]["excess"]) < 3 * found["largest"]["null_sd"]
    assert found["split_half"]["r"] == pytest.approx(found["split_half"]["null"], abs=0.1)
    assert found["between_heads"]["r"] == pytest.approx(found["between_heads"]["by_centring"], abs=0.1)


def test_permuting_the_heads_permutes_the_maps():
    """The slices of queries and sources change places, in a model whose sublayers are cut off: so do the maps."""
    order = torch.tensor([2, 0, 3, 1])
    model = multi()
    with torch.no_grad():
        for layer in model.model.layers:  # sublayers that say nothing: every source but the embedding is zero
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    before = head_maps(model, [tokens()])
    with torch.no_grad():
        for parameter in (model.model.embed_tokens.weight, *model.model.residual.parameters()):
            parameter.copy_(parameter.unflatten(-1, (4, -1))[..., order, :].flatten(-2))
    after = head_maps(model, [tokens()])
    for left, right in zip(before["sites"], after["sites"], strict=True):
        for key in ("weights", "deviation", "entropy"):
            torch.testing.assert_close(torch.tensor(left[key])[order], torch.tensor(right[key]), rtol=1e-4, atol=1e-6)
        assert left["deviation"][0] != pytest.approx(left["deviation"][1], rel=1e-2)
    matrix, permuted = (torch.tensor(x["deviation"]["between_heads"]["matrix"]) for x in (before, after))
    torch.testing.assert_close(matrix[order][:, order], permuted, rtol=1e-3, atol=1e-5)
    for key in ("split_half", "between_heads"):
        assert before["deviation"][key]["r"] == pytest.approx(after["deviation"][key]["r"], rel=1e-3)


@pytest.mark.parametrize("scheme", MULTI)
def test_the_maps_are_the_mean_weights_of_real_models(scheme):
    model = multi(scheme)
    found = head_maps(model, [tokens()], draws=2)
    for site, wanted in zip(found["sites"], mean_read_weights(model, [tokens()]), strict=True):
        assert {key: site[key] for key in ("site", "name", "sources")} == {
            key: wanted[key] for key in ("site", "name", "sources")
        }
        torch.testing.assert_close(torch.tensor(site["weights"]), torch.tensor(wanted["weights"]), rtol=1e-4, atol=1e-6)
        assert sum(map(sum, site["deviation"])) == pytest.approx(0.0, abs=1e-6)
        assert all(0 < entropy < math.log(len(site["sources"])) for entropy in site["entropy"])
    highest = max(abs(value) for site in found["sites"] for row in site["deviation"] for value in row)
    assert found["deviation"]["largest"]["largest"] == pytest.approx(highest)
    assert sum(source["mean_weight"] * source["sites"] for source in found["sources"]) == pytest.approx(
        len(found["sites"])
    )
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_one_head_has_maps_and_no_deviation():
    model = move_off_init(routed({"scheme": "mhar", "num_heads": 1}), std=0.3)
    found = head_maps(model, [tokens()], draws=2)
    assert found["deviation"] is None
    assert "deviation" not in found["sites"][0]
    assert len(found["sites"][0]["weights"]) == 1


def test_the_parts_of_a_text_give_what_the_whole_gives():
    model, ids = multi(), tokens(batch=5, length=8)
    whole = head_maps(model, [ids], draws=2)
    parts = head_maps(model, (ids[i : i + n] for i, n in ((0, 2), (2, 1), (3, 2))), draws=2)
    assert parts["tokens_by_half"] == whole["tokens_by_half"] == [24, 16]
    for key in ("split_half", "largest"):
        assert parts["deviation"][key] == pytest.approx(whole["deviation"][key], rel=1e-3)
    for left, right in zip(parts["sites"], whole["sites"], strict=True):
        torch.testing.assert_close(torch.tensor(left["weights"]), torch.tensor(right["weights"]))


def test_memory_does_not_grow_with_the_text():
    model, sizes = multi(), []

    def batches():
        for _ in range(4):
            yield tokens(batch=1, length=8)
            gc.collect()
            sizes.append(sum(found.numel() for found in gc.get_objects() if type(found) is torch.Tensor))

    head_maps(model, batches(), draws=2)
    assert len(set(sizes[1:])) == 1  # the second half of the text gets its sums with its first sequence
    assert sizes[0] == sizes[1]


def test_what_cannot_be_probed_is_refused():
    with pytest.raises(ValueError, match="reads nothing over depth"):
        head_maps(routed({"scheme": "additive"}), [tokens()])
    with pytest.raises(ValueError, match="draws is 0"):
        head_maps(multi(), [tokens()], draws=0)


@pytest.mark.gpu
def test_a_gpu_finds_what_the_cpu_finds():
    model = multi()
    here = head_maps(model, [tokens()], draws=2)
    there = head_maps(model.cuda(), [tokens()], draws=2)
    assert there["deviation"]["largest"] == pytest.approx(here["deviation"]["largest"], rel=1e-3, abs=1e-6)
    for left, right in zip(here["sites"], there["sites"], strict=True):
        torch.testing.assert_close(torch.tensor(left["weights"]), torch.tensor(right["weights"]), rtol=1e-3, atol=1e-6)
