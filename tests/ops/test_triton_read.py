"""The fused Triton read against the reference: the output and the gradient of every input."""

import pytest
import torch

from depthroute.ops import depth_mix
from ops.cases import (
    INTERPRETER,
    assert_as_good_as_reference,
    make_case,
    on_every_target,
    on_fp32,
    on_gpu,
    relative_error,
)

# (N, tokens, H, D): every N in {1, 2, 31, 33, 73, 129}, H in {1, 2, 4, 8} and D in {8, 48, 96, 160, 1280}, with the
# risky pairs: many sources of small rows, K that is no power of two, odd D, one token, rows that fill the registers.
SHAPES = [
    (1, 3, 1, 8),
    (1, 5, 8, 160),
    (2, 3, 2, 8),
    (2, 3, 8, 1280),
    (2, 5, 1, 48),
    (3, 3, 3, 21),
    (5, 1, 1, 17),
    (31, 3, 4, 160),
    (31, 1, 1, 1280),
    (33, 3, 8, 96),
    (33, 5, 8, 8),
    (73, 1, 8, 1280),
    (73, 3, 2, 48),
    (129, 3, 4, 48),
    (129, 3, 2, 96),
    (2, 1, 8, 7168),
    (2, 1, 1, 7168),
]


def shape_id(shape):
    N, tokens, H, D = shape
    return f"N{N}-T{tokens}-H{H}-D{D}"


@on_every_target
@pytest.mark.parametrize("shape", SHAPES, ids=shape_id)
def test_output_and_every_gradient_equal_the_reference(shape, target, poisoned_memory):
    N, tokens, H, D = shape
    case = make_case(N, (tokens, D), H, target)
    assert_as_good_as_reference(case, case.results(backend="triton"))


@on_gpu
@pytest.mark.parametrize("N", [2, 33])
def test_a_sharp_query_costs_nothing_in_bf16(N):
    case = make_case(N, (67, 512), 4, ("cuda", torch.bfloat16), spread=3.0)
    assert_as_good_as_reference(case, case.results(backend="triton"))


@on_gpu
@pytest.mark.parametrize("H", [1, 2, 4, 8])
@pytest.mark.parametrize("D", [8, 48, 96, 160, 1280])
@pytest.mark.parametrize("N", [1, 2, 31, 33, 73, 129])
def test_the_whole_grid_of_shapes_in_bf16(N, D, H, poisoned_memory):
    case = make_case(N, (67, D), H, ("cuda", torch.bfloat16))
    assert_as_good_as_reference(case, case.results(backend="triton"))


@on_every_target
@pytest.mark.parametrize("shape", [(3, 3, 2, 16), (5, 5, 1, 24)], ids=shape_id)
def test_programs_that_take_several_tokens_in_turn(shape, target, poisoned_memory, monkeypatch):
    monkeypatch.setattr("depthroute.ops.kernels.tiles.RESIDENT_WARPS", 2)
    monkeypatch.setattr("depthroute.ops.kernels.tiles.LANE", 1)
    N, tokens, H, D = shape
    case = make_case(N, (tokens, D), H, target)
    assert_as_good_as_reference(case, case.results(backend="triton"))


@on_every_target
@pytest.mark.parametrize("shape", [(1, 3, 2, 48), (3, 3, 2, 24), (2, 3, 1, 35)], ids=shape_id)
def test_rows_too_wide_for_registers_pass_through_in_slices(shape, target, poisoned_memory, monkeypatch):
    monkeypatch.setattr("depthroute.ops.kernels.tiles.MAX_ROW", 16)
    monkeypatch.setattr("depthroute.ops.kernels.tiles.RESIDENT_WARPS", 32)
    N, tokens, H, D = shape
    case = make_case(N, (tokens, D), H, target)
    assert_as_good_as_reference(case, case.results(backend="triton"))


@on_every_target
def test_rows_of_sixteen_thousand_channels(target, poisoned_memory):
    case = make_case(2, (1, 16384), 2, target)
    assert_as_good_as_reference(case, case.results(backend="triton"))


@on_every_target
def test_many_axes_before_the_width(target, poisoned_memory):
    case = make_case(3, (2, 1, 3, 24), 4, target)
    assert_as_good_as_reference(case, case.results(backend="triton"))


@on_every_target
def test_a_single_vector_is_a_source(target):
    case = make_case(3, (24,), 2, target)
    assert_as_good_as_reference(case, case.results(backend="triton"))


@on_fp32
def test_no_tokens_give_an_empty_mix_and_a_zero_query_gradient(target):
    results = make_case(3, (0, 16), 2, target).results(backend="triton")
    assert results["mix"].shape == (0, 16)
    assert torch.equal(results["query"], torch.zeros_like(results["query"]))


@on_every_target
def test_scale_and_eps_reach_the_kernel(target):
    case = make_case(4, (3, 32), 2, target)
    options = {"scale": 0.25, "eps": 0.5}
    results = case.results(backend="triton", **options)
    assert_as_good_as_reference(case, results, **options)
    default = case.results(backend="triton")
    assert all(relative_error(results[name], default[name]) > 1e-3 for name in results)


@on_fp32
@pytest.mark.parametrize("number", [0, 1])
def test_whole_numbers_do_for_scale_and_eps(number, target):
    case = make_case(3, (3, 32), 2, target)
    whole = case.results(backend="triton", scale=number, eps=number)
    real = case.results(backend="triton", scale=float(number), eps=float(number))
    assert all(torch.equal(whole[name], real[name]) for name in whole)


@on_every_target
def test_large_logits_neither_overflow_nor_lose_the_gradient(target):
    case = make_case(5, (3, 32), 2, target)
    with torch.no_grad():
        case.query.mul_(1e4)
    results = case.results(backend="triton")
    assert all(value.isfinite().all() for value in results.values())
    assert_as_good_as_reference(case, {"mix": results["mix"]})


@on_fp32
def test_stacked_and_listed_sources_give_the_same_bits(target):
    case = make_case(4, (3, 48), 4, target)
    stacked = torch.stack([source.detach() for source in case.sources]).requires_grad_()
    mix = depth_mix(stacked, case.query, num_heads=4, norm_weight=case.norm_weight, backend="triton")
    mix.backward(case.upstream)
    results = case.results(backend="triton")
    assert torch.equal(mix, results["mix"])
    for n, grad in enumerate(stacked.grad):
        assert torch.equal(grad, results[f"sources[{n}]"])


def transposed(base):
    return base.transpose(0, 1).contiguous().transpose(0, 1)


def every_other_channel(base):
    return base.repeat_interleave(2, -1)[..., ::2]


def part_of_a_wider_row(base):
    return torch.cat([base, base], -1)[..., : base.shape[-1]]


def one_element_into_the_storage(base):
    return torch.cat([base.new_zeros(1), base.flatten()])[1:].view(base.shape)


LAYOUTS = [transposed, every_other_channel, part_of_a_wider_row, one_element_into_the_storage]


@on_every_target
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_sources_of_any_strides(layout, target, poisoned_memory):
    case = make_case(3, (2, 3, 32), 4, target)
    strided = [layout(source) if n != 1 else source for n, source in enumerate(case.sources)]
    mix = depth_mix(strided, case.query, num_heads=4, norm_weight=case.norm_weight, backend="triton")
    grads = torch.autograd.grad(mix, [case.query, case.norm_weight, *case.sources], case.upstream)
    expected = case.results(backend="triton")
    for actual, wanted in zip([mix, *grads], expected.values(), strict=True):
        assert torch.equal(actual, wanted)


@on_fp32
def test_an_expanded_source_collects_the_gradient_of_all_tokens(target):
    case = make_case(2, (5, 32), 4, target)
    null = torch.randn(32, device=target[0], requires_grad=True)
    results = []
    for backend in ("triton", "reference"):
        mix = depth_mix([null.expand(5, 32), *case.sources], case.query, num_heads=4, backend=backend)
        results.append(torch.autograd.grad(mix, [null, case.query], case.upstream))
    torch.testing.assert_close(*results)


@on_every_target
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_upstream_gradients_of_any_strides(layout, target):
    case = make_case(3, (2, 3, 32), 4, target)
    mix = depth_mix(case.sources, case.query, num_heads=4, norm_weight=case.norm_weight, backend="triton")
    inputs = [case.query, case.norm_weight, *case.sources]
    plain = torch.autograd.grad(mix, inputs, case.upstream, retain_graph=True)
    strided = torch.autograd.grad(mix, inputs, layout(case.upstream))
    assert all(torch.equal(a, b) for a, b in zip(plain, strided, strict=True))


@on_fp32
def test_an_expanded_upstream_gradient(target):
    case = make_case(3, (3, 32), 4, target)
    mix = depth_mix(case.sources, case.query, num_heads=4, backend="triton")
    inputs = [case.query, *case.sources]
    summed = torch.autograd.grad(mix.sum(), inputs, retain_graph=True)  # autograd hands down an expanded scalar
    ones = torch.autograd.grad(mix, inputs, torch.ones_like(mix))
    assert all(torch.equal(a, b) for a, b in zip(summed, ones, strict=True))


@on_every_target
def test_two_runs_give_the_same_bits(target):
    case = make_case(5, (33, 16), 2, target)
    first, second = case.results(backend="triton"), case.results(backend="triton")
    assert all(torch.equal(first[name], second[name]) for name in first)


@on_every_target
def test_inputs_and_upstream_gradient_are_left_as_they_were(target):
    case = make_case(3, (3, 32), 4, target)
    tensors = [*case.sources, case.query, case.norm_weight, case.upstream]
    before = [tensor.detach().clone() for tensor in tensors]
    case.results(backend="triton")
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, before, strict=True))


@on_every_target
@pytest.mark.parametrize("H", [1, 4])
def test_one_source_gives_itself_and_a_query_gradient_of_exactly_zero(H, target):
    case = make_case(1, (3, 32), H, target)
    results = case.results(backend="triton")
    assert torch.equal(results["mix"], case.sources[0])
    assert torch.equal(results["sources[0]"], case.upstream)
    assert torch.equal(results["query"], torch.zeros_like(case.query))
    assert torch.equal(results["norm_weight"], torch.zeros_like(case.query))


@pytest.mark.parametrize("target", [INTERPRETER])
@pytest.mark.parametrize("query_dtype", [torch.bfloat16, torch.float64])
def test_the_query_keeps_its_own_dtype(query_dtype, target):
    case = make_case(3, (3, 32), 4, target)
    query = case.query.detach().to(query_dtype).requires_grad_()
    mix = depth_mix(case.sources, query, num_heads=4, backend="triton")
    mix.backward(case.upstream)
    assert mix.dtype == torch.float32
    assert query.grad.dtype == query_dtype


@on_fp32
def test_poison_would_be_seen(target, poisoned_memory):
    fresh = torch.zeros(3, device=target[0]).new_empty(5)
    assert fresh.isnan().all()
