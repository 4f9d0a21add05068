"""The disagreement probe on models with known answers, and against its definition spelt out on real ones."""

from __future__ import annotations

import gc
import json
import math

import pytest
import torch

from depthroute.probing import at_equal_sources, subspace_disagreement, tap_reads
from support.models import move_off_init, routed, tokens

SINGLE = {
    "mhar": {"scheme": "mhar", "num_heads": 1, "scale": 1.5},
    "block_mhar": {"scheme": "block_mhar", "num_heads": 1, "block_layers": 1},
    "delta_mhar": {"scheme": "delta_mhar", "num_heads": 1, "block_layers": 2},
}
TOKEN = torch.zeros(1, 3, dtype=torch.long)


def single(scheme="mhar", std=0.3):
    return move_off_init(routed(SINGLE[scheme]), std=std)


def kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def softmax(*logits):
    total = sum(map(math.exp, logits))
    return [math.exp(logit) / total for logit in logits]


def test_two_slices_that_want_two_sources_give_the_closed_form(given):
    """Source n is one half of the width, so slice n wants source n by c = 2 a r alone, and together they want none."""
    a, r = 0.7, math.sqrt(2)
    found = subspace_disagreement(given([a] * 4, [[[1, 1, 0, 0]], [[0, 0, 1, 1]]]), [TOKEN], slices=2)
    wanted = kl(softmax(2 * a * r, 0), [0.5, 0.5])
    assert found["contiguous"]["kl"] == pytest.approx(wanted)
    assert found["sites"][0]["slice_kl"] == pytest.approx([wanted, wanted])
    assert found["equal_strength"]["kl"] == pytest.approx(kl(softmax(4 * a * r, 0), [0.5, 0.5]))
    # Each interleaved slice has one channel of each source, and so wants none of them more.
    assert found["interleaved"]["kl"] == pytest.approx(0.0, abs=1e-12)


def test_slices_that_agree_and_are_sure_give_zero(given):
    found = subspace_disagreement(given([20.0, 0, 20.0, 0], [[[1, 0, 1, 0]], [[0, 1, 0, 1]]]), [TOKEN], slices=2)
    assert found["contiguous"]["kl"] == pytest.approx(0.0, abs=1e-9)


def test_slices_that_agree_give_zero_at_equal_strength_and_else_what_their_number_sharpens(given):
    c = 0.4 * math.sqrt(2)
    found = subspace_disagreement(given([0.4, 0, 0.4, 0], [[[1, 0, 1, 0]], [[0, 1, 0, 1]]]), [TOKEN], slices=2)
    assert found["equal_strength"]["kl"] == pytest.approx(0.0, abs=1e-12)
    assert found["contiguous"]["kl"] == pytest.approx(kl(softmax(c, 0), softmax(2 * c, 0)))


def test_one_slice_is_the_whole():
    found = subspace_disagreement(single(), [tokens()], slices=1, draws=2)
    for arrangement in ("contiguous", "interleaved", "equal_strength"):
        assert found[arrangement]["kl"] == pytest.approx(0.0, abs=1e-6)
        assert found[arrangement]["null"] == pytest.approx(0.0, abs=1e-6)


def test_a_fresh_query_gives_zero_and_so_does_its_null():
    found = subspace_disagreement(routed(SINGLE["mhar"]), [tokens()])
    assert found["contiguous"] == {"kl": 0.0, "null": 0.0, "null_sd": 0.0, "excess": 0.0}


def test_a_random_query_gives_the_null():
    model = move_off_init(routed(SINGLE["mhar"]))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for read in model.model.residual.reads:
            read.query.copy_(torch.randn(read.query.shape, generator=generator) * 0.2)
    found = subspace_disagreement(model, [tokens(batch=4, length=32)], draws=16)
    for arrangement in ("contiguous", "interleaved", "equal_strength"):
        reading = found[arrangement]
        assert reading["null"] > 0.01
        assert abs(reading["excess"]) < 3 * reading["null_sd"]
        assert abs(reading["excess"]) < 0.25 * reading["null"]


@pytest.mark.parametrize("scheme", SINGLE)
def test_it_is_the_definition_spelt_out_on_real_models(scheme):
    """Against the weights that each site uses, and a softmax for each slice by hand."""
    model, wanted = single(scheme), {}

    def spell_out(site, read, sources):
        alpha = read.weights(sources)[..., 0]  # (N, B, T)
        normed = [s * torch.rsqrt(s.square().mean(-1, keepdim=True) + read.eps) * read.norm_weight for s in sources]
        for name, channels in (
            ("contiguous", list(range(64))),
            ("interleaved", sorted(range(64), key=lambda i: i % 4)),
        ):
            for k in range(4):
                part = channels[16 * k : 16 * (k + 1)]
                logits = torch.stack([(n[..., part] * read.query[part]).sum(-1) * read.scale for n in normed])
                alone = logits.softmax(0)
                wanted.setdefault((site, name), []).append((alone * (alone / alpha).log()).sum(0).mean().item())

    with tap_reads(model, spell_out):
        model(tokens())
    found = subspace_disagreement(model, [tokens()], draws=2)
    assert len(found["sites"]) == len(wanted) / 2
    for site in found["sites"]:
        assert site["slice_kl"] == pytest.approx(wanted[site["site"], "contiguous"], rel=1e-3, abs=1e-6)
        for name in ("contiguous", "interleaved"):
            by_hand = sum(wanted[site["site"], name]) / 4
            assert site[name]["kl"] == pytest.approx(by_hand, rel=1e-3, abs=1e-6)
    overall = sum(site["contiguous"]["kl"] for site in found["sites"]) / len(found["sites"])
    assert found["contiguous"]["kl"] == pytest.approx(overall)
    assert found["contiguous"]["kl"] > 1e-3
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_the_parts_of_a_text_give_what_the_whole_gives():
    model, ids = single(), tokens(batch=5, length=8)
    whole = subspace_disagreement(model, [ids], draws=2)
    parts = subspace_disagreement(model, (ids[i : i + n] for i, n in ((0, 2), (2, 1), (3, 2))), draws=2)
    assert parts["tokens"] == whole["tokens"] == 40
    for left, right in zip(parts["sites"], whole["sites"], strict=True):
        assert left["contiguous"] == pytest.approx(right["contiguous"], rel=1e-3, abs=1e-6)
        assert left["interleaved"] == pytest.approx(right["interleaved"], rel=1e-3, abs=1e-6)


def test_memory_does_not_grow_with_the_text():
    model, sizes = single(), []

    def batches():
        for _ in range(4):
            yield tokens(batch=1, length=8)
            gc.collect()
            sizes.append(sum(found.numel() for found in gc.get_objects() if type(found) is torch.Tensor))

    subspace_disagreement(model, batches(), draws=2)
    assert len(set(sizes)) == 1


def test_masked_tokens_do_not_count(given):
    model = given([0.7] * 4, [[[1, 1, 0, 0], [1, 1, 1, 1]], [[0, 0, 1, 1], [1, 1, 1, 1]]])
    masked = {"input_ids": torch.tensor([[0, 1, 1]]), "attention_mask": torch.tensor([[1, 0, 0]])}
    alone, with_padding = (subspace_disagreement(model, [batch], slices=2) for batch in (TOKEN[:, :1], masked))
    assert with_padding["tokens"] == 1
    assert with_padding["contiguous"] == pytest.approx(alone["contiguous"])


def test_the_null_depends_on_the_seed_and_the_reading_does_not():
    model = single()
    first, again, other = (subspace_disagreement(model, [tokens()], seed=seed, draws=3) for seed in (0, 0, 1))
    assert first == again
    assert other["contiguous"]["null"] != first["contiguous"]["null"]
    assert other["contiguous"]["kl"] == pytest.approx(first["contiguous"]["kl"])
    assert subspace_disagreement(model, [tokens()], draws=1)["contiguous"]["null_sd"] is None


def test_sites_are_grouped_by_their_number_of_sources():
    found = subspace_disagreement(single("block_mhar"), [tokens()], draws=2)
    by_count = {row["num_sources"]: row for row in found["by_num_sources"]}
    assert {count: row["sites"] for count, row in by_count.items()} == {2: 2, 3: 2, 4: 2}
    in_group = [site["contiguous"]["kl"] for site in found["sites"] if site["num_sources"] == 3]
    assert by_count[3]["contiguous"]["kl"] == pytest.approx(sum(in_group) / 2)


def test_models_are_compared_at_the_source_counts_that_they_share():
    shallow = subspace_disagreement(single("delta_mhar"), [tokens()], draws=2)  # sites of 2 and of 3 sources
    deep = subspace_disagreement(single("mhar"), [tokens()], draws=2)  # one site of each, 2 to 7
    found = at_equal_sources({"shallow": shallow, "deep": deep})
    assert found["num_sources"] == [2, 3]
    first, second = (site["contiguous"]["kl"] for site in deep["sites"][:2])
    assert found["models"]["deep"]["contiguous"]["kl"] == pytest.approx((first + second) / 2)
    with pytest.raises(ValueError, match="results: shallow, none share no number of sources"):
        at_equal_sources({"shallow": shallow, "none": {"by_num_sources": []}})


@pytest.mark.parametrize(
    ("residual", "options", "message"),
    [
        ({"scheme": "mhar", "num_heads": 2}, {}, "its reads have 2 route heads"),
        ({"scheme": "additive"}, {}, "reads nothing over depth"),
        (SINGLE["mhar"], {"slices": 7}, "slices is 7; wanted a divisor of the width 64"),
        (SINGLE["mhar"], {"slices": 0}, "slices is 0"),
        (SINGLE["mhar"], {"draws": 0}, "draws is 0"),
    ],
)
def test_what_cannot_be_probed_is_refused(residual, options, message):
    with pytest.raises(ValueError, match=message):
        subspace_disagreement(routed(residual), [tokens(batch=1, length=4)], **options)


@pytest.mark.gpu
def test_a_gpu_finds_what_the_cpu_finds():
    model = single()
    here = subspace_disagreement(model, [tokens()], draws=2)
    there = subspace_disagreement(model.cuda(), [tokens()], draws=2)
    for left, right in zip(here["sites"], there["sites"], strict=True):
        assert right["contiguous"] == pytest.approx(left["contiguous"], rel=1e-3, abs=1e-6)
