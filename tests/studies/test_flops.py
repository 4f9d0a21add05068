from dataclasses import replace

import pytest

from depthroute import residual
from depthroute.models.presets import decoder_config
from depthroute.studies.flops import count_parameters, token_flops

D, L, F, A, KV, V, T = 128, 6, 384, 128, 64, 2048, 256


def _tiny(**residual):
    return token_flops(decoder_config("tiny", vocab_size=V), residual or None, sequence_length=T)


def test_weights_and_attention_of_a_decoder_by_hand():
    found = _tiny()
    layer = D * A + 2 * D * KV + A * D + 3 * D * F
    assert found.weights == 6 * (L * layer + V * D)
    assert found.output_head == 6 * V * D
    assert found.attention == 12 * L * T * A
    assert found.routing == found.routing_share == 0
    assert found.parameters == (found.weights - found.output_head) / 6 + V * D + L * (2 * D + 2 * 16) + D
    assert found.total == found.baseline == found.weights + found.attention


def test_a_causal_count_has_half_of_the_attention():
    config = decoder_config("tiny", vocab_size=V)
    assert token_flops(config, sequence_length=T, causal=True).attention == 6 * L * T * A


def test_an_untied_embedding_costs_what_a_tied_one_costs():
    untied = token_flops(decoder_config("tiny", vocab_size=V, tie_word_embeddings=False), sequence_length=T)
    assert replace(untied, parameters=0) == replace(_tiny(), parameters=0)
    assert untied.parameters - _tiny().parameters == V * D


def test_mhar_reads_every_source_at_every_site_after_the_first():
    found = _tiny(scheme="mhar")
    assert found.routing == 24 * D * sum(range(2, 2 * L + 2))
    assert found.routing_share == found.routing / found.baseline
    assert _tiny(scheme="mhar", num_heads=1).routing == found.routing


def test_block_mhar_reads_the_embedding_and_the_blocks():
    # Blocks of 4 layers in 6: sites 1 to 8 read embedding and block 0, sites 9 to 11 and the final read block 1 too.
    assert _tiny(scheme="block_mhar", block_layers=4).routing == 24 * D * (8 * 2 + 4 * 3)


def test_hyper_connections_by_hand():
    n = 4
    static = _tiny(scheme="hyper_connections", dynamic=False).routing
    dynamic = _tiny(scheme="hyper_connections", dynamic=True).routing
    assert static == 3 * 2 * L * (2 * n * D + 2 * n * n * D + 2 * n * D)
    assert dynamic - static == 3 * 2 * L * (4 * n * D + 2 * n * D * (n + 1) + 2 * n * D)


def test_mhc_by_hand():
    n = 4
    found = _tiny(scheme="mhc").routing
    assert found == 3 * 2 * L * (4 * n * D + 2 * n * n * D + 4 * n * D + 2 * n * D * (2 * n + n * n))


def test_denseformer_averages_all_outputs_after_every_layer():
    assert _tiny(scheme="denseformer").routing == 6 * D * sum(range(2, L + 2))


def test_every_registered_scheme_is_counted():
    for scheme in residual.available():
        assert _tiny(scheme=scheme).routing > 0 or scheme == "additive"


def test_parameters_are_counted_as_with_the_flops():
    config = decoder_config("tiny", vocab_size=V)
    for scheme in residual.available():
        assert count_parameters(config, {"scheme": scheme}) == _tiny(scheme=scheme).parameters


def test_an_unknown_scheme_is_an_error():
    with pytest.raises(ValueError, match="mhat"):
        _tiny(scheme="mhat")
