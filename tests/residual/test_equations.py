"""Each scheme against its paper's equations, written out as plain loops in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from depthroute import residual as schemes
from depthroute.residual.mhc import sinkhorn
from support.models import decoder, move_off_init, routed, tokens

WIDTH = 64


def build(scheme, **options):
    residual = schemes.build({"scheme": scheme, **options}, decoder(num_hidden_layers=5)).double()
    return move_off_init(residual, std=0.5)


def sublayer(site, x):
    return torch.sin(x * (1 + 0.1 * site)) + 0.3 * x.roll(1, -1)


def run(residual, x):
    """What every sublayer read, and what came out at the end."""
    state, reads = residual.start(x), []
    for site in range(residual.num_sites - 1):
        read, state = residual.read(state, site, nn.Identity())
        reads.append(read)
        state = residual.write(state, sublayer(site, read), site)
    return [*reads, residual.finish(state)]


def mix(sources, read, heads, scale=1.0, eps=1e-6):
    """method.md, "The read", one token and one head at a time."""
    width = WIDTH // heads
    out = torch.empty_like(sources[0])
    for b in range(out.shape[0]):
        for t in range(out.shape[1]):
            for h in range(heads):
                part = slice(h * width, (h + 1) * width)
                logits = []
                for source in sources:
                    r = 1 / math.sqrt(sum(v * v for v in source[b, t].tolist()) / WIDTH + eps)
                    key = source[b, t, part] * r
                    logits.append(scale * float((read.query[part] * read.norm_weight[part] * key).sum()))
                top = max(logits)
                weights = [math.exp(logit - top) for logit in logits]
                out[b, t, part] = sum(w / sum(weights) * s[b, t, part] for w, s in zip(weights, sources, strict=True))
    return out


def check(residual, x, wanted):
    with torch.no_grad():
        for site, (got, right) in enumerate(zip(run(residual, x), wanted(x), strict=True)):
            assert (got - right).abs().max() <= 1e-10 * right.abs().max(), site


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("sum_scaled", [False, True])
def test_mhar(heads, sum_scaled):
    residual = build("mhar", num_heads=heads, scale=0.7, read_scale="sum" if sum_scaled else "mean")

    def wanted(x):
        sources, reads = [x], [x]
        for site in range(10):
            sources.append(sublayer(site, reads[-1]))
            factor = len(sources) if sum_scaled else 1
            reads.append(factor * mix(sources, residual.reads[site], heads, 0.7))
        return reads

    check(residual, torch.randn(1, 2, WIDTH, dtype=torch.float64), wanted)


def test_single_head_is_one_softmax_over_the_whole_width():
    residual = build("mhar", num_heads=1)
    x = torch.randn(1, 2, WIDTH, dtype=torch.float64)
    state = residual.write(residual.start(x), torch.sin(x), 0)
    read, sources = residual.site_read(state, 1)
    keys = torch.stack([s / (s.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() for s in sources])
    wanted = ((keys * read.norm_weight) @ read.query).softmax(0)
    torch.testing.assert_close(read.weights(sources).squeeze(-1), wanted)


@pytest.mark.parametrize("block_layers", [1, 2, 5])
def test_block_mhar(block_layers):
    residual = build("block_mhar", num_heads=2, block_layers=block_layers)

    def wanted(x):
        finished, partial, reads = [x], None, []
        for site in range(10):
            sources = finished if partial is None else [*finished, partial]
            reads.append(x if site == 0 else mix(sources, residual.reads[site - 1], 2))
            y = sublayer(site, reads[-1])
            partial = y if partial is None else partial + y
            if site % 2 and (site // 2 + 1) % block_layers == 0:
                finished, partial = [*finished, partial], None
        sources = finished if partial is None else [*finished, partial]
        return [*reads, mix(sources, residual.reads[9], 2)]

    check(residual, torch.randn(1, 2, WIDTH, dtype=torch.float64), wanted)


@pytest.mark.parametrize("block_layers", [1, 2, 5])
def test_delta_mhar(block_layers):
    residual = build("delta_mhar", num_heads=2, block_layers=block_layers)

    def wanted(x):
        stream = start = x
        sources, reads = [x], []
        for site in range(10):
            read = residual.reads[site]
            null = read.null_source.expand_as(x)
            reads.append(stream + read.gate * mix([null, *sources], read, 2))
            stream = stream + sublayer(site, reads[-1])
            if site % 2 and (site // 2 + 1) % block_layers == 0:
                sources, start = [*sources, stream - start], stream
        return [*reads, stream]

    check(residual, torch.randn(1, 2, WIDTH, dtype=torch.float64), wanted)


@pytest.mark.parametrize("block_layers", [1, 2, 3])
def test_the_parts_of_delta_mhar_sum_to_the_stream_at_every_site(block_layers):
    residual = build("delta_mhar", block_layers=block_layers)
    state = residual.start(torch.randn(2, 3, WIDTH, dtype=torch.float64))
    for site in range(residual.num_sites - 1):
        x, state = residual.read(state, site, nn.Identity())
        state = residual.write(state, sublayer(site, x), site)
        finished, still_open = divmod(site + 1, 2 * block_layers)
        stream, *parts = state[: 2 + finished + bool(still_open)]
        torch.testing.assert_close(sum(parts), stream, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_hyper_connections(n, dynamic):
    residual = build("hyper_connections", num_streams=n, dynamic=dynamic)

    def wanted(x):
        streams, reads = [x] * n, []
        for site in range(10):
            weights = residual.connections[site]
            read_w, mix_w = weights.read_weight.expand(1, 2, n), weights.mix_weight.expand(1, 2, n, n)
            write_w = weights.write_weight.expand(1, 2, n)
            if dynamic:
                normed = [s / (s.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weights.norm_weight for s in streams]
                alpha = torch.stack([torch.tanh(s @ weights.dynamic_alpha) for s in normed], 2) * weights.alpha_scale
                beta = torch.stack([torch.tanh(s @ weights.dynamic_beta)[..., 0] for s in normed], 2)
                read_w, mix_w = read_w + alpha[..., 0], mix_w + alpha[..., 1:]
                write_w = write_w + beta * weights.beta_scale
            reads.append(sum(read_w[..., i, None] * streams[i] for i in range(n)))
            y = sublayer(site, reads[-1])
            mixed = [sum(mix_w[..., i, j, None] * streams[i] for i in range(n)) for j in range(n)]
            streams = [mixed[j] + write_w[..., j, None] * y for j in range(n)]
        return [*reads, sum(streams)]

    check(residual, torch.randn(1, 2, WIDTH, dtype=torch.float64), wanted)


@pytest.mark.parametrize(("period", "dilation"), [(1, 1), (2, 1), (1, 2), (2, 3)])
def test_denseformer(period, dilation):
    residual = build("denseformer", period=period, dilation=dilation)

    def wanted(x):
        outputs, stream, reads = [x], x, []
        for layer in range(5):
            for site in (2 * layer, 2 * layer + 1):
                reads.append(stream)
                stream = stream + sublayer(site, stream)
            outputs.append(stream)
            if (layer + 1) % period == 0:
                chosen = [j for j in range(layer + 2) if (layer + 1 - j) % dilation == 0]
                weights = residual.averages[str(layer)].weight
                stream = sum(weights[i] * outputs[j] for i, j in enumerate(chosen))
        return [*reads, stream]

    check(residual, torch.randn(1, 2, WIDTH, dtype=torch.float64), wanted)


@pytest.mark.parametrize("n", [1, 3])
def test_mhc(n):
    residual = build("mhc", num_streams=n, iterations=4)

    def wanted(x):
        streams, reads = [x] * n, []
        for site in range(10):
            weights = residual.connections[site]
            flat = torch.cat(streams, -1)
            logits = (flat / (flat.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()) @ weights.weight
            pre = torch.sigmoid(weights.scale[0] * logits[..., :n] + weights.pre_bias)
            post = 2 * torch.sigmoid(weights.scale[1] * logits[..., n : 2 * n] + weights.post_bias)
            mixing = torch.exp(weights.scale[2] * logits[..., 2 * n :].unflatten(-1, (n, n)) + weights.mix_bias)
            for _ in range(4):
                mixing = mixing / mixing.sum(-2, keepdim=True)
                mixing = mixing / mixing.sum(-1, keepdim=True)
            reads.append(sum(pre[..., i, None] * streams[i] for i in range(n)))
            y = sublayer(site, reads[-1])
            mixed = [sum(mixing[..., i, j, None] * streams[j] for j in range(n)) for i in range(n)]
            streams = [mixed[i] + post[..., i, None] * y for i in range(n)]
        return [*reads, sum(streams)]

    check(residual, torch.randn(1, 2, WIDTH, dtype=torch.float64), wanted)


def test_the_mixing_matrices_of_mhc_are_nearly_doubly_stochastic():
    matrix = sinkhorn(torch.randn(7, 4, 4, dtype=torch.float64), 20)
    torch.testing.assert_close(matrix.sum(-1), torch.ones(7, 4, dtype=torch.float64))
    torch.testing.assert_close(matrix.sum(-2), torch.ones(7, 4, dtype=torch.float64), rtol=1e-4, atol=1e-4)
    assert (matrix >= 0).all()


@pytest.mark.parametrize("n", [2, 4])
def test_hyper_connections_start_by_reading_one_stream_each_in_turn(n):
    residual = schemes.build({"scheme": "hyper_connections", "num_streams": n}, decoder())
    for site, connection in enumerate(residual.connections):
        assert connection.read_weight.tolist() == [float(i == site % n) for i in range(n)]
        assert torch.equal(connection.mix_weight, torch.eye(n))
        assert connection.write_weight.tolist() == [1.0] * n


@pytest.mark.parametrize(
    ("scheme", "sources"), [("mhar", "bfloat16"), ("block_mhar", "bfloat16"), ("delta_mhar", "bfloat16")]
)
def test_under_autocast_sources_are_cast_and_streams_are_not(scheme, sources):
    residual = routed({"scheme": scheme}).model.residual
    x = torch.randn(1, 3, WIDTH)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = residual.start(x)
        for site in range(4):
            read, state = residual.read(state, site, nn.Identity())
            state = residual.write(state, read.bfloat16(), site)
        _, read_from = residual.site_read(state, 4)
    assert {str(source.dtype) for source in read_from} == {f"torch.{sources}"}
    if scheme == "delta_mhar":
        assert state[0].dtype == torch.float32


def test_under_autocast_streams_of_hyper_connections_keep_their_dtype():
    residual = routed({"scheme": "hyper_connections"}).model.residual
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = residual.start(torch.randn(1, 3, WIDTH))
        read, state = residual.read(state, 0, nn.Identity())
        state = residual.write(state, read.bfloat16(), 0)
    assert state[0].dtype == torch.float32


def test_a_closed_gate_changes_nothing_under_autocast():
    plain, grafted = routed({"scheme": "additive"}), routed({"scheme": "delta_mhar", "block_layers": 1})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(plain(tokens()).logits, grafted(tokens()).logits)
