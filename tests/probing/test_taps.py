"""Taps: what they report, and that they leave no trace."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from depthroute.probing import tap_reads
from support.models import move_off_init, routed, stock, tokens


def mhar(**residual):
    return move_off_init(routed({"scheme": "mhar", "num_heads": 2, **residual}))


def test_every_reading_site_is_reported_once_in_order_with_its_sources():
    model, seen = mhar(), []
    with tap_reads(model, lambda site, read, sources: seen.append((site, read, len(sources)))):
        model(tokens())
    residual = model.model.residual
    assert [site for site, _, _ in seen] == list(range(1, residual.num_sites))
    assert [count for _, _, count in seen] == [len(residual.source_names(site)) for site, _, _ in seen]
    assert [read for _, read, _ in seen] == list(residual.reads)


def test_the_reported_weights_mix_the_sources_into_what_the_model_used():
    model, mixes, used = mhar(), {}, {}

    def record(site, read, sources):
        weights = read.weights(sources)
        by_head = torch.stack(sources).unflatten(-1, (read.num_heads, -1))
        mixes[site] = (weights[..., None] * by_head).sum(0).flatten(-2)

    last_norm = model.model.norm.register_forward_pre_hook(lambda _, inputs: used.update({6: inputs[0]}))
    with tap_reads(model, record), torch.no_grad():
        model(tokens())
    last_norm.remove()
    torch.testing.assert_close(mixes[6], used[6], rtol=1e-5, atol=1e-6)


def test_a_tapped_model_computes_what_it_computed_before():
    model, ids = mhar(), tokens()
    plain = model(ids, labels=ids)
    with tap_reads(model, lambda *_: None):
        tapped = model(ids, labels=ids)
    tapped.loss.backward()
    assert torch.equal(plain.logits, tapped.logits)
    assert all(read.query.grad is not None for read in model.model.residual.reads)


@pytest.mark.parametrize("fails", [False, True])
def test_the_scheme_is_as_before_on_exit_also_after_an_error(fails):
    model = mhar()
    before = dict(vars(model.model.residual))
    try:
        with tap_reads(model, lambda *_: None):
            assert "read" in vars(model.model.residual)
            if fails:
                raise RuntimeError
    except RuntimeError:
        assert fails
    assert vars(model.model.residual) == before


def test_taps_nest_and_unwind():
    model, outer, inner = mhar(), [], []
    with tap_reads(model, lambda site, *_: outer.append(site)):
        with tap_reads(model, lambda site, *_: inner.append(site)):
            model(tokens())
        model(tokens())
    assert inner == list(range(1, 7))
    assert outer == inner * 2
    assert "read" not in vars(model.model.residual)


def test_nothing_that_a_tap_reports_keeps_a_graph_or_itself_alive():
    model, kept, alive = mhar(), [], []

    def record(site, read, sources):
        assert not torch.is_grad_enabled()
        kept.append(read.weights(sources))
        alive.extend(weakref.ref(source) for source in sources)
        assert not any(source.requires_grad for source in sources)

    with tap_reads(model, record):
        model(tokens(), labels=tokens()).loss.backward()
    gc.collect()
    assert not any(weights.requires_grad for weights in kept)
    assert not any(reference() is not None for reference in alive)


def test_a_compiled_model_is_tapped_too():
    model, seen = mhar(), []
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(tokens(), use_cache=False)
        with tap_reads(compiled, lambda site, *_: seen.append(site)):
            compiled(tokens(), use_cache=False)
    assert seen == list(range(1, 7))


def test_a_scheme_without_reads_reports_nothing():
    model, seen = routed({"scheme": "additive"}), []
    with tap_reads(model, lambda *event: seen.append(event)):
        model(tokens())
    assert seen == []


def test_a_model_without_a_scheme_is_refused():
    with (
        pytest.raises(TypeError, match="model: Qwen3ForCausalLM has no residual scheme"),
        tap_reads(stock(), lambda *_: None),
    ):
        pass
