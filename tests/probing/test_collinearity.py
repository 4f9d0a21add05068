"""Collinearity of sources with known angles, and against all pairs spelt out."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F

from depthroute.probing import source_collinearity, tap_reads
from support.models import move_off_init, routed, tokens


@pytest.mark.parametrize(
    ("table", "cosine"),
    [
        ([[[2, 0]], [[0, 3]]], 0.0),
        ([[[1, 1]], [[5, 5]], [[2, 2]]], 1.0),
        ([[[1, 2]], [[-2, -4]]], -1.0),
        ([[[1, 0]], [[1, 1]]], 2**-0.5),
        ([[[0, 0]], [[1, 1]], [[1, 1]]], 1 / 3),  # a zero source is at right angles to all
    ],
)
def test_sources_at_known_angles(given, table, cosine):
    found = source_collinearity(given([1.0, 1.0], table), [torch.zeros(1, 2, dtype=torch.long)])
    assert found["cosine"] == pytest.approx(cosine, abs=1e-6)


@pytest.mark.parametrize("scheme", ["mhar", "block_mhar", "delta_mhar"])
def test_it_is_the_mean_over_all_pairs_on_real_models(scheme):
    model, wanted = move_off_init(routed({"scheme": scheme})), {}

    def spell_out(site, read, sources):
        cosines = [F.cosine_similarity(a, b, dim=-1).mean() for a, b in itertools.combinations(sources, 2)]
        wanted[site] = torch.stack(cosines).mean().item()

    with tap_reads(model, spell_out):
        model(tokens())
    found = source_collinearity(model, [tokens()])
    assert {site["site"]: site["cosine"] for site in found["sites"]} == pytest.approx(wanted, abs=1e-5)
    assert found["cosine"] == pytest.approx(sum(wanted.values()) / len(wanted), abs=1e-5)
