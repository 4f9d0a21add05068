"""What every registered scheme must hold. A new scheme is in here by being registered."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from depthroute import residual as schemes
from support.models import decoder, gradients, in_fp64, move_off_init, routed, stock, tokens

VARIANTS = {
    "mhar": [
        {"num_heads": 1},
        {"num_heads": 4, "scale": 0.5},
        {"read_scale": "sum"},
        {"read_scale": "sum", "backend": "reference"},
    ],
    "block_mhar": [
        {"block_layers": 1},
        {"block_layers": 2, "num_heads": 1, "read_scale": "sum"},
        {"block_layers": 2, "backend": "reference"},
    ],
    "delta_mhar": [
        {"block_layers": 1},
        {"block_layers": 2, "num_heads": 1},
        {"block_layers": 2, "scale": 0.5, "backend": "reference"},
    ],
    "denseformer": [{"period": 2}, {"dilation": 2}],
    "mhc": [{"num_streams": 2, "iterations": 3}],
    "hyper_connections": [{"dynamic": False}, {"num_streams": 2}],
}
CASES = [{"scheme": scheme, **options} for scheme in schemes.available() for options in [{}, *VARIANTS.get(scheme, [])]]


def name(case):
    return "-".join(f"{value}" if key == "scheme" else f"{key}={value}" for key, value in case.items())


@pytest.fixture(params=CASES, ids=name)
def case(request):
    return request.param


def batch():
    ids = tokens()
    return {"input_ids": ids, "labels": ids}


def test_identity_at_init_is_what_the_scheme_declares(case):
    model = routed(case)
    declared = model.model.residual.identity_at_init
    # Norms without eps: what remains of "up to the eps of the norms" is rounding.
    ours, theirs = in_fp64(model, norm_eps=1e-60), in_fp64(stock(), norm_eps=1e-60)
    logits, wanted = ours(tokens()).logits, theirs(tokens()).logits
    if declared == "exact":
        assert torch.equal(logits, wanted)
    elif declared == "up_to_eps":
        assert (logits - wanted).abs().max() <= 1e-10 * wanted.abs().max()
    else:
        assert declared is None


def test_parameters_moved_off_their_initial_values_change_the_function(case):
    if case["scheme"] == "additive":
        assert not list(routed(case).model.residual.parameters())
        return
    model = routed(case)
    before = model(tokens()).logits
    move_off_init(model.model.residual)
    assert (model(tokens()).logits - before).abs().max() > 1e-4


def test_every_gradient_is_there_at_init_and_non_zero_off_it(case):
    model = routed(case)
    _, at_init = gradients(model, **batch())
    assert not [key for key, gradient in at_init.items() if gradient is None]
    _, off_init = gradients(move_off_init(model), **batch())
    assert not [key for key, gradient in off_init.items() if gradient is None or not gradient.abs().max() > 0]


def test_parameters_live_under_model_residual_and_none_is_zero_dimensional(case):
    ours, plain = dict(routed(case).named_parameters()), dict(stock().named_parameters())
    assert set(plain) <= set(ours)
    assert all(key.startswith("model.residual.") for key in set(ours) - set(plain))
    assert all(parameter.dim() >= 1 for parameter in ours.values())


def test_a_scheme_draws_no_random_numbers(case):
    ours, plain = dict(routed(case).named_parameters()), dict(stock().named_parameters())
    assert all(torch.equal(ours[key], parameter) for key, parameter in plain.items())


def test_tokens_are_routed_independently(case):
    residual = move_off_init(routed(case).model.residual.double())
    x = torch.randn(2, 5, 64, dtype=torch.float64)

    def run(x):
        state = residual.start(x)
        for site in range(residual.num_sites - 1):
            y, state = residual.read(state, site, nn.Identity())
            state = residual.write(state, torch.sin(y + site), site)
        return residual.finish(state)

    changed = x.clone()
    changed[0, 3] += 1.0
    difference = (run(changed) - run(x)).abs().amax(-1)
    assert difference[0, 3] > 1e-3
    difference[0, 3] = 0.0
    assert difference.max() == 0.0


def test_later_tokens_do_not_reach_earlier_ones(case):
    model = move_off_init(routed(case))
    ids = tokens()
    changed = ids.clone()
    changed[:, 7:] = (changed[:, 7:] + 5) % 100 + 3
    before, after = model(ids).logits, model(changed).logits
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


@pytest.mark.compat
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_gradients_equal_plain_ones_bit_for_bit(case, use_reentrant):
    model = move_off_init(routed(case)).train()
    loss, plain = gradients(model, **batch())
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    checkpointed_loss, checkpointed = gradients(model, **batch(), use_cache=False)
    assert torch.equal(loss, checkpointed_loss)
    assert plain.keys() == checkpointed.keys()
    for key, gradient in plain.items():
        assert checkpointed[key] is not None, key
        assert torch.equal(gradient, checkpointed[key]), key


def test_compiles_without_a_graph_break(case):
    torch._dynamo.reset()
    model = move_off_init(routed(case)).train()
    loss, plain = gradients(model, **batch(), use_cache=False)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    model.zero_grad(set_to_none=True)
    compiled_loss = compiled(**batch(), use_cache=False).loss
    compiled_loss.backward()
    torch.testing.assert_close(compiled_loss, loss, rtol=1e-5, atol=1e-6)
    for key, parameter in model.named_parameters():
        assert (parameter.grad - plain[key]).abs().max() <= 1e-4 * plain[key].abs().max() + 1e-8, key


@pytest.mark.gpu
def test_compiled_training_on_a_gpu_equals_eager_training(case):
    """Both round to bf16, in different places: each is as far from fp64 as the other."""
    torch._dynamo.reset()
    inputs = {key: value.cuda() for key, value in batch().items()}
    model, exact = (move_off_init(routed(case)).cuda().train() for _ in range(2))
    found = [_all_gradients(in_fp64(exact), inputs)]
    for function in (model, torch.compile(model, fullgraph=True)):
        model.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = function(**inputs, use_cache=False).loss
        loss.backward()
        found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    eager, compiled = ((result - found[0]).norm() / found[0].norm() for result in found[1:])
    assert compiled <= 1.5 * eager


def _all_gradients(model, inputs):
    _, found = gradients(model, **inputs, use_cache=False)
    return torch.cat([grad.flatten() for grad in found.values()])


@pytest.mark.compat
def test_cached_decoding_equals_the_full_forward(case):
    model = move_off_init(routed(case))
    ids = tokens(length=9)
    with torch.no_grad():
        full = model(ids).logits
        cache, steps = None, []
        for chunk in (ids[:, :4], ids[:, 4:5], ids[:, 5:8], ids[:, 8:]):  # prefill, one token, a chunk, one token
            out = model(chunk, past_key_values=cache, use_cache=True)
            cache = out.cache if "cache" in out else out.past_key_values
            steps.append(out.logits)
    torch.testing.assert_close(torch.cat(steps, 1), full, rtol=1e-4, atol=5e-5)


@pytest.mark.compat
def test_state_dict_round_trip(case):
    model = move_off_init(routed(case))
    other = routed(case, seed=5)
    missing, unexpected = other.load_state_dict(model.state_dict())
    assert not missing
    assert not unexpected
    assert torch.equal(other(tokens()).logits, model(tokens()).logits)


def test_the_state_is_a_flat_tuple_and_is_not_changed_in_place(case):
    residual = move_off_init(routed(case).model.residual)
    state = residual.start(torch.randn(1, 3, 64))
    for site in range(residual.num_sites - 1):
        before = tuple(tensor.clone() for tensor in state)
        x, after = residual.read(state, site, nn.Identity())
        written = residual.write(after, x * 0.5, site)
        assert all(isinstance(tensor, torch.Tensor) for tensor in (*after, *written))
        assert all(torch.equal(a, b) for a, b in zip(before, state, strict=True))
        state = written


def test_reads_name_their_sources_and_their_weights_explain_what_is_read(case):
    residual = move_off_init(routed(case).model.residual)
    state = residual.start(torch.randn(2, 3, 64))
    for site in range(residual.num_sites):
        last = site == residual.num_sites - 1
        x, after = (residual.finish(state), state) if last else residual.read(state, site, nn.Identity())
        found = residual.site_read(state, site)
        if found is None:
            assert residual.source_names(site) == ()
        else:
            read, sources = found
            weights = read.weights(sources)
            assert len(residual.source_names(site)) == len(sources) == len(weights)
            torch.testing.assert_close(weights.sum(0), torch.ones_like(weights[0]))
            by_head = torch.stack(list(sources)).unflatten(-1, (read.num_heads, -1))
            mix = (weights.unsqueeze(-1) * by_head).sum(0).flatten(-2)
            torch.testing.assert_close(read(sources), mix, rtol=1e-4, atol=1e-5)
        if not last:
            state = residual.write(after, torch.sin(x + site), site)


def test_every_scheme_is_built_from_its_resolved_options(case):
    resolved = schemes.resolve(case, decoder())
    assert resolved.items() >= case.items()
    assert schemes.resolve(resolved, decoder()) == resolved
