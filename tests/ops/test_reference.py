"""The reference against the formula written out, and the facts that set this read apart from its neighbours."""

import math

import pytest
import torch

from depthroute.ops import depth_mix
from ops.cases import make_case, relative_error


def written_out(sources, query, num_heads, norm_weight, eps, scale):
    """The read for each token and head in turn, in Python floats (fp64)."""
    D = query.numel()
    K = D // num_heads
    mix = torch.zeros_like(sources[0])
    for token in range(sources[0].shape[0]):
        rows = [source[token].tolist() for source in sources]
        rms = [math.sqrt(sum(x * x for x in row) / D + eps) for row in rows]
        for h in range(num_heads):
            channels = range(h * K, (h + 1) * K)
            logits = [
                scale * sum(query[k].item() * norm_weight[k].item() * row[k] for k in channels) / size
                for row, size in zip(rows, rms, strict=True)
            ]
            total = sum(math.exp(logit - max(logits)) for logit in logits)
            for k in channels:
                mix[token, k] = sum(
                    math.exp(logit - max(logits)) / total * row[k] for logit, row in zip(logits, rows, strict=True)
                )
    return mix


@pytest.mark.parametrize(("N", "tokens", "H", "D"), [(1, 3, 1, 8), (2, 3, 4, 8), (5, 2, 3, 21), (31, 3, 2, 16)])
def test_equals_the_formula_written_out_in_fp64(N, tokens, H, D):
    case = make_case(N, (tokens, D), H).double()
    options = {"num_heads": H, "norm_weight": case.norm_weight, "eps": 1e-3, "scale": 0.7}
    mix = depth_mix(case.sources, case.query, **options)
    expected = written_out(case.sources, case.query, H, case.norm_weight, 1e-3, 0.7)
    torch.testing.assert_close(mix.detach(), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("H", [1, 2])
def test_gradients_equal_finite_differences(H):
    case = make_case(3, (2, 6), H).double()

    def read(query, norm_weight, *sources):
        return depth_mix(sources, query, num_heads=H, norm_weight=norm_weight, scale=1.3, return_weights=True)

    assert torch.autograd.gradcheck(read, (case.query, case.norm_weight, *case.sources))
    assert torch.autograd.gradgradcheck(read, (case.query, case.norm_weight, *case.sources))


def test_a_zero_query_reads_the_uniform_mean_and_still_gets_a_gradient():
    case = make_case(4, (3, 16), 2).double()
    query = torch.zeros_like(case.query, requires_grad=True)
    mix = depth_mix(case.sources, query, num_heads=2)
    torch.testing.assert_close(mix, torch.stack(case.sources).mean(0), rtol=1e-12, atol=1e-12)
    mix.backward(case.upstream)
    assert query.grad.abs().min() > 0


def test_the_norm_runs_over_the_full_width_and_not_over_a_slice():
    case = make_case(3, (2, 16), 4).double()
    scaled = [source.detach().clone() for source in case.sources]
    scaled[0][:, 8:] *= 5  # the other heads' slices of one source: the first head's logits change by the norm alone
    _, before = depth_mix(case.sources, case.query, num_heads=4, return_weights=True)
    _, after = depth_mix(scaled, case.query, num_heads=4, return_weights=True)
    assert not torch.allclose(before[..., 0], after[..., 0])


def test_logits_carry_no_root_of_the_width():
    sources = [torch.ones(1, 16, dtype=torch.float64), -torch.ones(1, 16, dtype=torch.float64)]
    query = torch.full((16,), 1 / 16, dtype=torch.float64)
    _, weights = depth_mix(sources, query, eps=0.0, return_weights=True)
    assert weights[0].item() == pytest.approx(math.exp(1) / (math.exp(1) + math.exp(-1)))


def test_the_values_are_the_raw_sources():
    case = make_case(3, (2, 16), 2).double()
    options = {"num_heads": 2, "eps": 0.0}
    small = depth_mix(case.sources, case.query, **options)
    large = depth_mix([7 * source for source in case.sources], case.query, **options)
    torch.testing.assert_close(large, 7 * small)


def test_one_head_over_a_slice_is_that_head_of_many():
    # With eps alone in the norm (sources of equal rms) each head is a read of its own slice.
    case = make_case(3, (2, 16), 4).double()
    sources = [torch.nn.functional.normalize(source.detach(), dim=-1) for source in case.sources]
    _, together = depth_mix(sources, case.query, num_heads=4, return_weights=True)
    masked = torch.zeros_like(case.query)
    masked[4:8] = case.query.detach()[4:8]
    _, alone = depth_mix(sources, masked, num_heads=1, return_weights=True)
    torch.testing.assert_close(together[..., 1], alone[..., 0])


@pytest.mark.parametrize(
    "option", [{"num_heads": 4}, {"scale": 2.0}, {"eps": 1.0}, {"norm_weight": torch.arange(16.0)}]
)
def test_every_option_changes_the_mix(option):
    case = make_case(3, (2, 16), 2)
    default = depth_mix(case.sources, case.query, num_heads=2)
    changed = depth_mix(case.sources, case.query, **{"num_heads": 2, **option})
    assert not torch.allclose(default, changed)


def test_weights_are_a_differentiable_softmax_for_each_token_and_head():
    case = make_case(4, (2, 3, 16), 2)
    mix, weights = depth_mix(case.sources, case.query, num_heads=2, return_weights=True)
    assert weights.shape == (4, 2, 3, 2)
    torch.testing.assert_close(weights.sum(0), torch.ones(2, 3, 2))
    rebuilt = (weights.unsqueeze(-1) * torch.stack(case.sources).unflatten(-1, (2, 8))).sum(0).flatten(-2)
    torch.testing.assert_close(mix, rebuilt)
    (grad,) = torch.autograd.grad(weights[0].sum(), case.query)
    assert grad.abs().min() > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_mix_has_the_dtype_of_the_sources_and_the_weights_that_of_the_arithmetic(dtype):
    case = make_case(3, (2, 16), 2, ("cpu", dtype))
    mix, weights = depth_mix(case.sources, case.query, num_heads=2, return_weights=True)
    assert mix.dtype == dtype
    assert weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_only_the_result_is_rounded(dtype):
    case = make_case(5, (3, 16), 2, ("cpu", dtype))
    in_fp32 = depth_mix([source.float() for source in case.sources], case.query, num_heads=2)
    assert torch.equal(depth_mix(case.sources, case.query, num_heads=2), in_fp32.to(dtype))


def test_fp64_sources_are_read_in_fp64():
    case = make_case(5, (3, 16), 2).double()
    exact = depth_mix(case.sources, case.query, num_heads=2)
    in_fp32 = depth_mix([source.float() for source in case.sources], case.query.float(), num_heads=2)
    assert 1e-9 < relative_error(in_fp32, exact) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(dtype):
    case = make_case(3, (2, 16), 2, ("cpu", dtype))
    plain = case.results()
    with torch.autocast("cpu", torch.bfloat16):
        cast = case.results()
    assert all(torch.equal(plain[name], cast[name]) for name in plain)


@pytest.mark.parametrize("H", [1, 4])
def test_one_source_gives_itself_and_a_query_gradient_of_exactly_zero(H):
    case = make_case(1, (3, 16), H)
    results = case.results(backend="reference")
    assert torch.equal(results["mix"], case.sources[0])
    assert torch.equal(results["sources[0]"], case.upstream)
    assert torch.equal(results["query"], torch.zeros(16))


def test_lists_tuples_and_stacked_tensors_agree_with_a_gradient_for_each_element():
    case = make_case(3, (2, 16), 2)
    listed = case.results()
    as_tuple = depth_mix(tuple(case.sources), case.query, num_heads=2, norm_weight=case.norm_weight)
    stacked = torch.stack([source.detach() for source in case.sources]).requires_grad_()
    mix = depth_mix(stacked, case.query, num_heads=2, norm_weight=case.norm_weight)
    mix.backward(case.upstream)
    assert torch.equal(as_tuple, listed["mix"])
    assert torch.equal(mix, listed["mix"])
    for n, grad in enumerate(stacked.grad):
        assert torch.equal(grad, listed[f"sources[{n}]"])
