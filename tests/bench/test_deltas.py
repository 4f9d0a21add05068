"""The chain of gated reads: what its arms compute, and what the check says of it."""

from __future__ import annotations

import functools

import torch
from torch import nn

from depthroute.bench import chains, deltas, route
from depthroute.bench.chains import Shape
from depthroute.ops.two_phase.plan import Plan
from depthroute.residual.delta_mhar import DeltaMhar

SMALL = Shape(sites=8, tokens=5, width=24, heads=2, block=4)
PLAIN = functools.partial(deltas.with_engine, kernels=False)


def test_every_arm_runs_the_same_chain():
    chain = deltas.make_chain(SMALL, torch.float64, "cpu").double()
    expected = chain.step(deltas.with_reference)
    for actual in (chain.step(PLAIN), chain.step(route._compiled(PLAIN))):
        assert len(actual) == 2 + 4 * SMALL.sites
        for ours, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_it_is_the_chain_of_delta_mhar():
    chain = deltas.make_chain(SMALL, torch.float64, "cpu").double()

    class Decoder:
        num_hidden_layers, hidden_size, num_attention_heads, num_key_value_heads = SMALL.sites // 2, 24, 2, 2

    scheme = DeltaMhar(DeltaMhar.Options(num_heads=2, block_layers=2, backend="reference"), Decoder()).double()
    assert scheme.plan == Plan.deltas(SMALL.sites, SMALL.block)
    for read, site in zip(scheme.reads, chain.reads, strict=True):
        read.load_state_dict(vars(site))
    state = scheme.start(chain.x)
    for site, factor in enumerate(chain.factors):
        x, state = scheme.read(state, site, nn.Identity())
        state = scheme.write(state, x * factor, site)
    torch.testing.assert_close(scheme.finish(state), deltas.with_reference(chain), rtol=1e-12, atol=1e-12)


def test_with_closed_gates_only_the_map_is_left():
    chain = deltas.make_chain(SMALL, torch.float64, "cpu").double()
    with torch.no_grad():
        for read in chain.reads:
            read.gate.zero_()
    torch.testing.assert_close(
        chains.with_map_alone(chain, deltas.join), deltas.with_reference(chain), rtol=1e-12, atol=1e-12
    )


def test_a_right_chain_is_green_and_a_wrong_one_is_not():
    found = route.check(SMALL, torch.float32, PLAIN, device="cpu")
    assert found["green"]
    kinds = ("query", "norm weight", "null source", "gate")
    assert list(found["errors"]) == ["output", "input gradient", *(f"{kind} gradients" for kind in kinds)]
    assert not route.check(SMALL, torch.float32, lambda chain: PLAIN(chain) * 1.001, device="cpu")["green"]


def test_a_wrong_gradient_of_the_gates_is_seen():
    def wrong(chain):
        for read in chain.reads:
            read.gate.register_hook(lambda grad: 1.01 * grad)
        return PLAIN(chain)

    found = route.check(SMALL, torch.float32, wrong, device="cpu")
    assert found["errors"]["gate gradients"]["ours"] > 5e-3
    assert not found["green"]


def test_the_8b_shape_has_a_stream_that_stays_in_range():
    shape = chains.SHAPES["8b-delta"]
    assert (shape.sites, shape.tokens, shape.width, shape.heads, shape.block) == (64, 2 * 4096, 4096, 8, 8)
    chain = deltas.make_chain(shape, torch.bfloat16, "cpu", tokens=2)
    assert 1 < chains.with_map_alone(chain, deltas.join).detach().float().square().mean().sqrt() < 20
