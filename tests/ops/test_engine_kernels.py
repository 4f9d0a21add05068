"""The Triton kernels of the two phases: interpreted on the CPU at small shapes, compiled on a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from depthroute.ops.kernels import two_phase as kernels
from depthroute.ops.kernels.settings import obstacle, overriding
from depthroute.ops.two_phase import algebra, kernels_for
from ops.cases import CUDA, INTERPRETER, on_every_target, on_gpu
from ops.draws import FP32, Draw, assert_close, flat
from ops.engine_chains import error, inputs, make, results

SUMS = list(itertools.product((False, True), repeat=2))  # sums so far: of rows, of rstd

# (sources, sites, width, heads, tokens): heads of 12 and 20 channels, of one and several chunks, more sources than one
# step of the kernel takes, more sites than the narrow tile has, heads of several parts.
INTER = [
    (1, 1, 24, 2, 2), (5, 3, 40, 2, 3), (19, 2, 20, 1, 2), (3, 10, 12, 3, 1), (2, 3, 288, 1, 2), (35, 3, 320, 2, 5)
]  # fmt: skip


# Channels are dealt anew for products of 16 bits; the interpreter has no products in bf16.
INTERPRETED_IN_16_BITS = pytest.param(("cpu", torch.float16), id="interpreter-fp16", marks=INTERPRETER.marks)


@pytest.mark.parametrize("target", [INTERPRETER, INTERPRETED_IN_16_BITS, *CUDA])
@pytest.mark.parametrize(("exact", "sums"), [(False, SUMS[0]), (False, SUMS[1]), (False, SUMS[2]), (True, SUMS[0]),
                                             (True, SUMS[3])])  # fmt: skip
@pytest.mark.parametrize("case", INTER, ids=str)
def test_inter_forward_and_backward_equal_the_algebra(target, case, exact, sums, poisoned_memory):
    n, s, width, heads, tokens = case
    draw = Draw(target, tokens, width, heads)
    sources, rstd, weight = [draw.row() for _ in range(n)], [draw.stat() for _ in range(n)], draw.weight(s)
    forward = kernels.inter_forward(sources, rstd, weight, heads)
    expected = algebra.inter_forward(sources, rstd, weight, heads)
    assert_close(forward, expected, target[1])
    # Some sums so far are absent, or all.
    addends = [draw.row() if i % 2 == (n > 1) else None for i in range(n)] if sums[0] else ()
    rstd_addends = [None if i % 3 == 1 else draw.stat() for i in range(n)] if sums[1] else ()
    upstream, lse_grads = [draw.row() for _ in range(s)], [draw.stat() for _ in range(s)]
    arguments = (upstream, lse_grads, sources, rstd, weight, expected[1], heads, addends, rstd_addends, exact)
    actual = kernels.inter_backward(*arguments)
    assert_close(actual, algebra.inter_backward(*arguments), target[1])
    assert all(torch.equal(a, b) for a, b in zip(flat(actual), flat(kernels.inter_backward(*arguments)), strict=True))
    assert_equal_in_parts(kernels.inter_backward(*arguments, parts=tokens + 2), actual, 2, target[1])


# One head with a norm is no case: the norm's gradient is orthogonal to the mix, and the normaliser's zero.
# (sources, has an inter read, has a norm, width, heads, tokens)
MERGE = [(1, False, False, 24, 2, 3), (1, True, True, 20, 2, 1), (3, True, False, 40, 2, 5), (4, False, True, 36, 3, 2)]


@on_every_target
@pytest.mark.parametrize("sums", SUMS, ids=str)
@pytest.mark.parametrize("case", MERGE, ids=str)
def test_merge_forward_and_backward_equal_the_algebra(target, case, sums, poisoned_memory):
    m, has_inter, has_norm, width, heads, tokens = case
    draw = Draw(target, tokens, width, heads)
    partial, lse_in = (draw.row(), draw.stat()) if has_inter else (None, None)
    sources, rstd = [draw.row() for _ in range(m)], [draw.stat() for _ in range(m - 1)]
    weight, gamma = draw.weight(1)[0], draw.weight(1)[0].to(target[1]) if has_norm else None
    expected = algebra.merge_forward(partial, lse_in, sources, rstd, weight, gamma, heads, 1e-6, 1e-5)
    actual = kernels.merge_forward(partial, lse_in, sources, rstd, weight, gamma, heads, 1e-6, 1e-5)
    assert_close(actual, expected, target[1])
    _, lse, newest, raws = expected
    addends = [draw.row() if i % 2 == (m > 1) else None for i in range(m)] if sums[0] else ()
    rstd_addends = [None if i % 2 else draw.stat() for i in range(m - 1)] if sums[1] else ()
    rstd_grad = draw.stat() if has_inter else None
    arguments = (draw.row(), rstd_grad, partial, lse_in, lse, newest, raws, sources, rstd, weight, gamma, heads,
                 1e-5, addends, rstd_addends)  # fmt: skip
    wanted = algebra.merge_backward(*arguments)
    actual = kernels.merge_backward(*arguments)
    assert_close(actual, wanted, target[1])
    assert_equal_in_parts(kernels.merge_backward(*arguments, parts=tokens + 2), actual, 3, target[1])
    with overriding(merge_backward_programs=1):  # which then has one token after the other
        assert_close(kernels.merge_backward(*arguments), wanted, target[1])


def assert_equal_in_parts(actual, whole, at, dtype):
    """With the weights' gradient, which is in place `at`, in more parts than there are tokens: some are zero."""
    parts = actual[at]
    assert not parts[-1].any()
    assert_close((*actual[:at], parts.sum(0), *actual[at + 1 :]), whole, dtype)


@on_every_target
def test_a_chain_with_fused_norms_equals_reads_one_by_one(target, poisoned_memory):
    device, dtype = target
    options = {"norm": True, "dtype": dtype, "device": device, "width": 24}
    x, upstream = inputs(24, dtype, device, (2, 37))
    chain = make(5, mode="kernels", **options)
    found = results(chain, x, upstream)
    expected = results(
        make(5, mode="reference", **options).float(), x.detach().float().requires_grad_(), upstream.float()
    )
    plain = results(make(5, mode="reference", **options), x, upstream)
    if dtype == torch.float32:
        assert error(found, expected) <= FP32
        return
    assert error(found[:2], expected[:2]) <= 1.5 * error(plain[:2], expected[:2])
    assert error([stack(found)], [stack(expected)]) <= 1.5 * error([stack(plain)], [stack(expected)])


@on_gpu
def test_a_chain_on_another_device_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")

    def on(device):
        options = {"dtype": torch.bfloat16, "device": device, "width": 64}
        found = results(make(9, mode="kernels", norm=True, **options), *inputs(**options))
        return [tensor.cpu() for tensor in found if tensor is not None]

    with torch.cuda.device(0):
        assert all(torch.equal(a, b) for a, b in zip(on("cuda:1"), on("cuda:0"), strict=True))


# (dtype, sites, width, heads, has norms): tiles of 8 and of 16 sites, heads of one part, of two, of several chunks. One
# head is tried as models have it, with a norm behind every read (docs/operator.md says what a chain without loses).
CHAINS = [
    (torch.bfloat16, 33, 512, 4, False),
    (torch.bfloat16, 33, 512, 4, True),
    (torch.bfloat16, 73, 1280, 8, False),
    (torch.bfloat16, 73, 1280, 8, True),
    (torch.bfloat16, 25, 1280, 1, True),
    (torch.bfloat16, 25, 512, 16, True),
    (torch.bfloat16, 129, 96, 2, False),
    (torch.float16, 33, 512, 4, False),
    (torch.float16, 33, 512, 4, True),
    (torch.float32, 33, 256, 2, True),
]


@on_gpu
@pytest.mark.parametrize(("dtype", "sites", "width", "heads", "norm"), CHAINS)
def test_long_chains_are_as_good_as_the_reference_and_equal_from_run_to_run(dtype, sites, width, heads, norm):
    options = {"width": width, "heads": heads, "norm": norm, "device": "cuda"}
    x, upstream = inputs(width, dtype, "cuda", (2, 37))

    def chain(mode, wide):
        made = make(sites, mode=mode, dtype=torch.float32, **options)
        made.norms.to(dtype)  # a norm whose weight is of another type would change the type of what it norms
        return made.to(torch.float64) if wide else made

    exact = results(chain("reference", True), x.detach().double().requires_grad_(), upstream.double())
    kernels_, plain = chain("kernels", False), chain("reference", False)
    found, again, beside = results(kernels_, x, upstream), results(kernels_, x, upstream), results(plain, x, upstream)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True) if a is not None)
    assert error(found[:2], exact[:2]) <= max(1e-5, 1.5 * error(beside[:2], exact[:2]))
    assert error([stack(found)], [stack(exact)]) <= max(1e-5, 1.5 * error([stack(beside)], [stack(exact)]))


def stack(result):
    """The gradients of all parameters in one vector."""
    return torch.cat([tensor.flatten().double() for tensor in result[2:] if tensor is not None])


@on_gpu
def test_a_chain_replays_from_a_cuda_graph():
    options = {"width": 512, "heads": 4, "device": "cuda", "dtype": torch.bfloat16, "mode": "kernels"}
    chain = make(9, **options)
    x, upstream = inputs(512, torch.bfloat16, "cuda", (2, 64))
    expected = results(chain, x, upstream)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        results(chain, x, upstream)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = results(chain, x, upstream)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True) if a is not None)


@on_gpu
@pytest.mark.parametrize("compiled", ["aot_eager", "inductor"])
def test_a_compiled_chain_equals_an_eager_one(compiled):
    torch._dynamo.reset()
    options = {"width": 256, "heads": 2, "device": "cuda", "dtype": torch.float32, "mode": "kernels", "norm": True}
    x, upstream = inputs(256, torch.float32, "cuda", (2, 37))
    chain = make(9, **options)
    expected = results(chain, x, upstream)
    out = torch.compile(chain, fullgraph=True, backend=compiled)(x)
    found = [out.detach(), *torch.autograd.grad((out * upstream).sum(), [x, *chain.parameters()], allow_unused=True)]
    assert error(found, expected) <= FP32


def test_strided_sources_and_gradients_give_the_same_result():
    if torch.cuda.is_available():
        pytest.skip("interpreted only without a CUDA device; strides are made plain before any kernel runs")
    draw = Draw(("cpu", torch.float32), 3, 24, 2)
    sources, rstd, weight = [draw.row() for _ in range(2)], [draw.stat()], draw.weight(1)[0]
    strided = [torch.stack([source, source], -1)[..., 0] for source in sources]
    upstream = torch.ones(1, 1).expand(3, 24)
    found = []
    for own, grad in ((sources, upstream.contiguous()), (strided, upstream)):
        mix, lse, newest, raws = kernels.merge_forward(None, None, own, rstd, weight, None, 2, 1e-6, 0.0)
        grads = kernels.merge_backward(grad, None, None, None, lse, newest, raws, own, rstd, weight, None, 2, 0.0)
        found.append(flat((mix, lse, newest, raws, *grads)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@on_every_target
def test_no_tokens_are_read_without_kernels(target):
    x = torch.zeros(0, 24, device=target[0], dtype=target[1], requires_grad=True)
    assert kernels_for(x, 2, "triton") is False
    found = results(make(5, mode="plain", norm=True, dtype=target[1], device=target[0], width=24), x, x.detach())
    assert found[0].shape == (0, 24)
    assert not any(grad.any() for grad in found[1:] if grad is not None)


def test_settings_can_be_replaced_for_a_while():
    from depthroute.ops.kernels.settings import merge_tile

    chosen = merge_tile(8, 160, 2, "backward")
    with overriding(merge_backward_lane=16):
        assert merge_tile(8, 160, 2, "backward").warps == chosen.warps // 2
    assert merge_tile(8, 160, 2, "backward") == chosen


def test_a_merge_pads_no_row_whose_heads_are_a_few_equal_parts_wide():
    from depthroute.ops.kernels.settings import merge_tile

    for heads, width, parts in ((8, 160, 5), (8, 128, 1), (3, 192, 3), (9, 64, 1), (1, 576, 9)):
        tile = merge_tile(heads, width, 2, "backward")
        assert (tile.width * tile.parts, tile.parts) == (width, parts)
    assert merge_tile(8, 100, 2, "forward")[2:4] == (128, 1)


def test_an_inter_read_pads_no_head_whose_chunks_are_a_few_equal_parts_wide():
    from depthroute.ops.kernels.settings import inter_tile

    def cut(width, itemsize=2):
        tile = inter_tile(5, width, itemsize, "forward")
        return tile.chunks, tile.width, tile.parts

    whole = {128: (1, 32, 4), 160: (1, 32, 5), 64: (1, 32, 2), 80: (1, 16, 5), 192: (1, 32, 6), 512: (4, 32, 4)}
    assert {width: cut(width) for width in whole} == whole
    assert cut(160, itemsize=4) == (2, 16, 5)
    assert cut(1408) == (8, 32, 6)
    assert obstacle(1, 1408, 2) is None
    for width in (8, 24, 100, 700):  # padded
        chunks, part, count = cut(width)
        assert width <= chunks * part * count < 2 * max(width, 16)


def test_programs_of_an_inter_read_run_at_once(monkeypatch):
    """A warp has its registers in one of the four quarters of a multiprocessor; shared memory is of the whole."""
    from depthroute.ops.kernels.settings import (
        MULTIPROCESSORS,
        REGISTERS,
        SHARED,
        WARP,
        inter_budget,
        inter_shared,
        inter_tile,
    )  # fmt: skip

    monkeypatch.setenv("TRITON_INTERPRET", "0")
    shapes = ((4, 128, 2), (8, 160, 2), (8, 240, 2), (8, 160, 4), (8, 512, 2), (1, 1536, 2), (1, 512, 4))
    for (heads, width, itemsize), sites, phase in itertools.product(shapes, (8, 16), ("forward", "backward")):
        tile = inter_tile(sites, width, itemsize, phase)
        for override in (None, 144, 184, 200):
            with overriding(**({f"inter_{phase}_registers": override} if override else {})):
                registers, programs = inter_budget(tile, heads, itemsize, phase)
            resident = programs * heads / MULTIPROCESSORS
            assert resident * tile.warps <= 4 * (REGISTERS // 4 // (WARP * registers))
            assert resident * (inter_shared(tile, itemsize, phase) + 1024) <= SHARED


def test_a_backward_merge_has_as_many_programs_as_fit_on_the_card(monkeypatch):
    from depthroute.ops.kernels.settings import MULTIPROCESSORS, REGISTERS, WARP, merge_budget, merge_tile

    monkeypatch.setenv("TRITON_INTERPRET", "0")
    for heads, width, itemsize in ((4, 128, 2), (8, 128, 2), (8, 160, 2), (8, 160, 4), (8, 512, 2), (1, 8192, 2)):
        tile = merge_tile(heads, width, itemsize, "backward")
        for sources in (1, 8):
            registers, programs = merge_budget(tile, itemsize, sources)
            assert programs >= MULTIPROCESSORS
            assert programs == MULTIPROCESSORS * (4 * (REGISTERS // 4 // (registers * WARP)) // tile.warps)


def test_rows_too_wide_for_the_kernels_are_named():
    assert obstacle(8, 160, 2) is None
    assert obstacle(1, 1280, 2) is None
    assert obstacle(8, 512, 4) is None
    assert obstacle(8, 512, 2) is None
    assert "registers" in obstacle(8, 2048, 2)
    assert "shared memory" in obstacle(1, 4096, 2)
    assert "shared memory" in obstacle(1, 1280, 4)
