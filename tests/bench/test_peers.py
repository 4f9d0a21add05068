"""Other packages' operators as arms: what their calls get, and what is said where there is no call."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from depthroute.bench import chains, peers, route
from depthroute.bench.chains import Shape

SMALL = Shape(sites=7, tokens=5, width=16, heads=1)


def mixed(sources, query, norm_weight, eps):
    """The read in plain PyTorch of (N, ..., D), with the eps that the operators are told."""
    assert eps == 1e-6
    assert query.shape == norm_weight.shape == sources.shape[-1:]
    keys = sources * torch.rsqrt(sources.square().mean(-1, keepdim=True) + eps) * norm_weight
    return ((keys * query).sum(-1, keepdim=True).softmax(0) * sources).sum(0)


# As the packages declare them, names of arguments included.
def phase_1_batched_attention_triton_op(block_representations, pseudo_queries, eps):
    assert block_representations.ndim == 4
    ones = torch.ones_like(pseudo_queries[0])
    mixes = [mixed(block_representations, query, ones, eps) for query in pseudo_queries]
    return torch.stack(mixes), torch.zeros(len(mixes), *block_representations.shape[1:3])


def attnres(values, query, *, eps=2**-23, scale=1.0):
    assert isinstance(values, tuple)
    assert query.dtype == values[0].dtype
    return scale * mixed(torch.stack(values), query, torch.ones_like(query), eps)


def fused_attnres(query, residuals, rms_weight, output_rms_weight=None, rms_eps=1e-5, scale=1.0):
    assert output_rms_weight is None
    assert isinstance(residuals, tuple)
    return scale * mixed(torch.stack(residuals), query, rms_weight, rms_eps)


def liger_attn_res(V, w_query, w_norm, eps=1e-5):
    return mixed(V, w_query, w_norm, eps)


OPERATORS = {
    operator.__name__: operator
    for operator in (phase_1_batched_attention_triton_op, attnres, fused_attnres, liger_attn_res)
}


@pytest.fixture
def installed(monkeypatch):
    """All packages, with operators of plain PyTorch."""
    monkeypatch.setattr(peers, "version", lambda name: "1.2.3")
    for peer in peers.PEERS.values():
        module = SimpleNamespace(**{peer.operator: OPERATORS[peer.operator]})
        monkeypatch.setitem(sys.modules, peer.module, module)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", peers.PEERS)
def test_a_peer_runs_the_same_chain(name):
    chain = chains.make_chain(SMALL, torch.float64, "cpu").double()
    expected = chain.step(chains.with_reference)
    for actual, wanted in zip(chain.step(route.runner(name, SMALL)), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-11)


@pytest.fixture
def in_this_process(monkeypatch):
    """In this process, which alone has these operators."""

    def run_here(seconds, call, *arguments):
        try:
            return call(*arguments)
        except Exception as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    monkeypatch.setattr(route, "run_apart", run_here)


def row(name, limit=60.0):
    return route.measure_peer(route.Case("small", SMALL, torch.float32, name, "cpu"), 1.0, limit)


@pytest.mark.usefixtures("installed", "in_this_process")
def test_a_peer_with_errors_is_not_green(monkeypatch):
    module = SimpleNamespace(liger_attn_res=lambda *inputs: 1.001 * liger_attn_res(*inputs))
    monkeypatch.setitem(sys.modules, peers.PEERS["liger-kernel"].module, module)
    found = row("liger-kernel")
    assert not found["check"]["green"]
    assert "graph_ms" not in found
    assert found["version"] == "1.2.3"
    assert "no numbers: errors too large; error/ref" in route.table([found])


@pytest.mark.usefixtures("installed", "in_this_process")
def test_a_peer_whose_two_runs_differ_is_not_green(monkeypatch):
    noise = iter(range(1000))
    module = SimpleNamespace(liger_attn_res=lambda *inputs: liger_attn_res(*inputs) + 1e-7 * next(noise))
    monkeypatch.setitem(sys.modules, peers.PEERS["liger-kernel"].module, module)
    assert route.reason(row("liger-kernel")) == "no numbers: two runs differ"


@pytest.mark.usefixtures("installed", "in_this_process")
def test_what_a_peer_raises_is_the_reason(monkeypatch):
    def fails(*inputs):
        raise ValueError("at most 16 sources")

    monkeypatch.setitem(sys.modules, peers.PEERS["liger-kernel"].module, SimpleNamespace(liger_attn_res=fails))
    found = row("liger-kernel")
    assert found["cannot_run"] == "ValueError: at most 16 sources"
    assert "cannot run: ValueError: at most 16 sources" in route.table([found])


@pytest.mark.usefixtures("installed")
def test_a_peer_has_a_process_of_its_own_and_so_much_time():
    assert row("liger-kernel", limit=0.01)["cannot_run"] == "took more than 0.01 s"


@pytest.mark.usefixtures("installed")
def test_a_known_limit_is_said_without_a_call():
    assert row("flash-attn-res")["cannot_run"] == "takes bfloat16 alone"


@pytest.mark.parametrize(
    ("name", "shape", "why"),
    [
        ("flash-attn-res", chains.SHAPES["1b-h1"], "takes a power of two as width, and the shape has 1280"),
        ("flash-attn-res", chains.SHAPES["350m-h1"], None),
        ("fast-attnres", Shape(130, 8, 16, 1), "takes 129 sources at most, and the shape has 130"),
        ("fast-attnres", Shape(3, 8, 8200, 1), "takes a width of 8192 at most, and the shape has 8200"),
        ("fast-attnres", chains.SHAPES["1b-h1"], None),
        ("flash-linear-attention", chains.SHAPES["1b-h1"], None),
        ("liger-kernel", chains.SHAPES["1b-h1"], None),
    ],
)
def test_limits_of_a_shape(name, shape, why):
    assert peers.obstacle(name, shape, torch.bfloat16) == why


def test_a_package_that_is_not_there_is_said_so(monkeypatch):
    monkeypatch.setitem(peers.PEERS, "fake", peers.Peer("no-such-distribution-here", "no_such_module", "read", None))
    assert peers.version("fake") is None
    assert peers.missing("fake") == "not installed: pip install fake"
