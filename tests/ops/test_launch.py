"""Pointer tables, tiles, and what the kernels cost on a GPU."""

import pytest
import torch

from depthroute.ops import depth_mix
from ops.cases import Case, make_case, on_fp32, on_gpu, relative_error

pytest.importorskip("triton", reason="needs Triton, which has no build for this platform")

from depthroute.ops.kernels import launch, read, wide
from depthroute.ops.kernels.tiles import LANE, MAX_ROW, MAX_WARPS, WARP, read_tile, wide_tile


@on_fp32
@pytest.mark.parametrize("N", [1, 15, 16, 17, 63, 64, 65, 146, 255, 256, 257, 330])
def test_a_pointer_table_holds_every_address_and_a_padding_of_the_last(N, target, poisoned_memory):
    tensors = [torch.empty(3, device=target[0]) for _ in range(N)]
    table = launch.pointer_table(tensors).tolist()
    assert table[:N] == [tensor.data_ptr() for tensor in tensors]
    assert set(table[N:]) <= {tensors[-1].data_ptr()}
    assert len(table) % launch.SPANS[0] == 0


@on_fp32
@pytest.mark.parametrize(("N", "size"), [(3, 1), (20, 1500), (300, 70)])
def test_the_kernel_of_a_pointer_table_rounds_a_tensor_too(N, size, target, poisoned_memory):
    tensors = [torch.empty(3, device=target[0]) for _ in range(N)]
    values = torch.randn(size, device=target[0])
    out = torch.empty_like(values, dtype=torch.float16)
    table = launch.pointer_table(tensors, rounded=(values, out)).tolist()
    assert table[:N] == [tensor.data_ptr() for tensor in tensors]
    assert torch.equal(out, values.half())


class Compiles:
    """A kernel that compiles a variant at each call, as Triton would for a call that it has not seen."""

    def __init__(self):
        self.compiled, self.replayed = [], []

    def __getitem__(self, grid):
        def call(*arguments, num_warps):
            self.compiled.append((grid, arguments, num_warps))
            return self.Variant(self.replayed)

        return call

    class Variant:
        def __init__(self, replayed):
            self.replayed = replayed

        def __getitem__(self, grid):
            return lambda *arguments: self.replayed.append((grid, arguments))


def test_a_variant_is_compiled_once_and_then_called_with_addresses():
    kernel, tensor = Compiles(), torch.zeros(8)
    for scale in (0.5, 0.25):
        launch.launch(kernel, 3, (tensor, (64, 128), 7, scale), (16,), num_warps=2)
    assert kernel.compiled == [((3,), (tensor, (64, 128), 7, 0.5, 16), 2)]
    assert kernel.replayed == [((3, 1, 1), (tensor.data_ptr(), (64, 128), 7, 0.25, 16))]


@pytest.mark.parametrize(
    ("arguments", "constants", "warps"),
    [
        ((torch.zeros(8).half(), (64, 128), 7, 0.5), (16,), 2),
        ((torch.zeros(8), (64, 128, 192), 7, 0.5), (16,), 2),
        ((torch.zeros(8), (64, 128), 7, 1), (16,), 2),
        ((torch.zeros(8), (64, 128), 7, 0.5), (32,), 2),
        ((torch.zeros(8), (64, 128), 7, 0.5), (16,), 4),
    ],
    ids=["dtype", "addresses", "an int for a float", "constant", "warps"],
)
def test_what_makes_another_variant(arguments, constants, warps):
    kernel = Compiles()
    launch.launch(kernel, 3, (torch.zeros(8), (64, 128), 7, 0.5), (16,), num_warps=2)
    launch.launch(kernel, 3, arguments, constants, num_warps=warps)
    assert len(kernel.compiled) == 2
    assert not kernel.replayed


def test_nothing_is_compiled_for_no_tokens():
    """Their tensors have no addresses, which Triton would take for numbers of another type."""
    kernel = Compiles()
    launch.launch(kernel, 0, (torch.zeros(0), (0, 0), 7, 0.5), (16,), num_warps=2)
    assert not kernel.compiled
    launch._variants.clear()
    assert len(launch.pointer_table([torch.zeros(0, 8)] * 3)) == launch.SPANS[0]
    assert not launch._variants


def test_plain_copies_only_what_is_strided_or_unaligned():
    base = torch.arange(64.0)
    assert launch.plain(base) is base
    for view in (base[1:33], base.view(8, 8).t(), base[:1].expand(8)):
        copy = launch.plain(view)
        assert torch.equal(copy, view)
        assert copy.is_contiguous()
        assert copy.data_ptr() % launch.ALIGNMENT == 0


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(
    ("H", "K"), [(1, 1), (1, 7), (3, 7), (4, 128), (8, 160), (1, 1280), (32, 128), (8, 896), (64, 112)]
)
def test_a_tile_covers_the_row_and_gives_each_lane_no_more_than_its_share(H, K, itemsize):
    tile = read_tile(H, K, itemsize)
    assert tile.heads >= H
    assert tile.width >= K
    assert tile.tokens * tile.heads * tile.width == tile.warps * WARP * LANE
    assert tile.warps <= MAX_WARPS


@pytest.mark.parametrize(("H", "K"), [(1, 8193), (2, 8192), (8, 1025), (96, 128), (5, 2048)])
def test_wider_rows_are_cut_into_slices_of_the_largest_tile(H, K):
    assert read_tile(H, K, 2) is None
    tile = wide_tile(H)
    assert tile.heads >= H
    assert tile.heads * tile.width == MAX_ROW


def compiled_by(run, *kernels):
    """What `run` makes each kernel compile."""
    launch._variants.clear()
    for kernel in kernels:
        kernel.device_caches.clear()
    run()
    return [
        [variant for caches in kernel.device_caches.values() for variant in caches[0].values()] for kernel in kernels
    ]


@on_gpu
def test_a_model_of_73_sites_compiles_one_variant_of_each_kernel():
    def run():
        for N in range(1, 74):
            make_case(N, (16 + N, 264), 3, ("cuda", torch.bfloat16)).results(backend="triton")

    variants = compiled_by(run, read._forward_kernel, read._backward_kernel, launch._write)
    assert [len(each) for each in variants] == [1, 1, 3]


@on_gpu
@pytest.mark.parametrize(("H", "D"), [(4, 512), (8, 1024), (8, 1280), (1, 1280), (32, 4096), (8, 7168), (1, 7168)])
def test_no_kernel_spills_registers(H, D):
    case = make_case(5, (8, D), H, ("cuda", torch.bfloat16))
    variants = compiled_by(lambda: case.results(backend="triton"), read._forward_kernel, read._backward_kernel)
    assert [len(each) for each in variants] == [1, 1]
    assert max(each[0].n_spills for each in variants) <= 16, "words of local memory a lane"


@on_gpu
def test_a_captured_graph_replays_on_new_numbers():
    """No copy from the host, no wait for the device, no address that changes: else the capture or the replay fails."""
    case = make_case(20, (64, 256), 4, ("cuda", torch.bfloat16))
    leaves = [case.query, case.norm_weight, *case.sources]

    def step():
        mix = depth_mix(case.sources, case.query, num_heads=4, norm_weight=case.norm_weight, backend="triton")
        return [mix.detach(), *torch.autograd.grad(mix, leaves, case.upstream)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    new = make_case(20, (64, 256), 4, ("cuda", torch.bfloat16), seed=1)
    fresh = [new.query, new.norm_weight, *new.sources, new.upstream]
    with torch.no_grad():
        for old, value in zip([*leaves, case.upstream], fresh, strict=True):
            old.copy_(value)
    graph.replay()
    torch.cuda.synchronize()
    for actual, expected in zip(captured, new.results(backend="triton").values(), strict=True):
        assert torch.equal(actual, expected)


@on_gpu
@pytest.mark.parametrize("slices", [False, True], ids=["whole rows", "slices"])
def test_offsets_beyond_two_to_the_31(slices, monkeypatch):
    if slices:
        monkeypatch.setattr("depthroute.ops.kernels.tiles.MAX_ROW", 512)
    T, D, tail = 2**21 + 3, 1024, 67
    sources = [torch.empty(T, D, device="cuda", dtype=torch.bfloat16).normal_().requires_grad_() for _ in range(3)]
    query = (torch.randn(D, device="cuda") / 16).requires_grad_()
    upstream = torch.zeros(T, D, device="cuda", dtype=torch.bfloat16)
    upstream[-tail:].normal_()
    assert sources[0].numel() > 2**31
    mix = depth_mix(sources, query, num_heads=4, backend="triton")
    grads = torch.autograd.grad(mix, [query, *sources], upstream)
    ones = torch.ones(D, device="cuda", requires_grad=True)
    end = Case(tuple(s.detach()[-tail:].clone().requires_grad_() for s in sources), query, ones, upstream[-tail:], 4)
    expected = end.results(backend="reference")
    assert relative_error(mix[-tail:], expected["mix"]) < 5e-3
    assert relative_error(grads[0], expected["query"]) < 1e-4
    for n in range(3):
        assert relative_error(grads[1 + n][-tail:], expected[f"sources[{n}]"]) < 5e-3
        assert not grads[1 + n][: T - tail].any()


@on_gpu
def test_more_tokens_than_a_second_grid_axis_could_hold():
    case = make_case(2, (70_001, 512), 4, ("cuda", torch.bfloat16))
    results = case.results(backend="triton")
    expected = case.results(backend="reference")
    for name in results:
        assert relative_error(results[name], expected[name]) < 5e-3, name


@on_gpu
def test_tensors_of_another_device_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    case = make_case(3, (5, 64), 4, ("cuda:1", torch.bfloat16))
    with torch.cuda.device(0):
        on_second = case.results(backend="triton")
    on_first = make_case(3, (5, 64), 4, ("cuda:0", torch.bfloat16)).results(backend="triton")
    assert all(torch.equal(on_second[name].cpu(), on_first[name].cpu()) for name in on_first)


def test_wide_and_narrow_kernels_agree(monkeypatch):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    case = make_case(3, (3, 48), 2, (device, torch.float32))
    narrow = case.results(backend="triton")
    monkeypatch.setattr("depthroute.ops.kernels.tiles.MAX_ROW", 16)
    calls = []
    monkeypatch.setattr(wide, "forward", lambda *a, run=wide.forward: calls.append("forward") or run(*a))
    monkeypatch.setattr(wide, "backward", lambda *a, run=wide.backward: calls.append("backward") or run(*a))
    sliced = case.results(backend="triton")
    assert calls == ["forward", "backward"]
    for name in narrow:
        torch.testing.assert_close(sliced[name], narrow[name])
