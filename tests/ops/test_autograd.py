"""The fused read in every way that autograd is used."""

import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from depthroute.ops import depth_mix, register
from ops.cases import INTERPRETER, make_case, on_every_target, on_fp32, on_gpu


def read(case, sources=None):
    return depth_mix(
        case.sources if sources is None else sources,
        case.query,
        num_heads=case.num_heads,
        norm_weight=case.norm_weight,
        backend="triton",
    )


def inputs(case):
    return [case.query, case.norm_weight, *case.sources]


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@on_every_target
def test_backward_twice_with_a_retained_graph(target):
    case = make_case(3, (3, 32), 4, target)
    mix = read(case)
    first = torch.autograd.grad(mix, inputs(case), case.upstream, retain_graph=True)
    assert same(first, torch.autograd.grad(mix, inputs(case), case.upstream))


@on_fp32
def test_partial_backward_and_then_the_full_one(target):
    case = make_case(4, (3, 32), 4, target)
    mix = read(case)
    full = list(case.results(backend="triton").values())[1:]
    (only,) = torch.autograd.grad(mix, case.sources[2], case.upstream, retain_graph=True)
    assert torch.equal(only, full[4])
    (only,) = torch.autograd.grad(mix, case.query, case.upstream, retain_graph=True)
    assert torch.equal(only, full[0])
    assert same(torch.autograd.grad(mix, inputs(case), case.upstream), full)


@on_fp32
@pytest.mark.parametrize("wide", [False, True], ids=["whole rows", "slices"])
def test_sources_without_a_gradient_are_neither_written_nor_given_one(wide, target, monkeypatch):
    if wide:
        monkeypatch.setattr("depthroute.ops.kernels.tiles.MAX_ROW", 16)
    case = make_case(4, (3, 32), 4, target)
    full = case.results(backend="triton")
    sources = [source if n in (1, 3) else source.detach().clone() for n, source in enumerate(case.sources)]
    read(case, sources).backward(case.upstream)
    assert [source.grad is None for source in sources] == [True, False, True, False]
    for n in (1, 3):
        assert torch.equal(sources[n].grad, full[f"sources[{n}]"])
    for n in (0, 2):
        assert torch.equal(sources[n], case.sources[n])


@on_fp32
def test_frozen_query_and_frozen_sources(target):
    case = make_case(3, (3, 32), 4, target)
    full = case.results(backend="triton")
    frozen = [source.detach() for source in case.sources]
    (query,) = torch.autograd.grad(read(case, frozen), case.query, case.upstream)
    assert torch.equal(query, full["query"])
    mix = depth_mix(
        case.sources, case.query.detach(), num_heads=4, norm_weight=case.norm_weight.detach(), backend="triton"
    )
    assert torch.equal(torch.autograd.grad(mix, case.sources[0], case.upstream)[0], full["sources[0]"])
    assert not read(case, frozen).detach().requires_grad
    with torch.no_grad():
        assert not read(case).requires_grad


@on_fp32
def test_one_tensor_as_two_sources_gets_both_gradients(target):
    case = make_case(3, (3, 32), 4, target)
    twin = case.sources[0].detach().clone().requires_grad_()
    apart = torch.autograd.grad(read(case, [*case.sources, twin]), [case.sources[0], twin], case.upstream)
    (both,) = torch.autograd.grad(read(case, [*case.sources, case.sources[0]]), case.sources[0], case.upstream)
    torch.testing.assert_close(both, sum(apart))


@on_fp32
def test_two_models_interleaved(target):
    one, two = make_case(3, (3, 32), 4, target, seed=1), make_case(5, (2, 16), 2, target, seed=2)
    mixes = read(one), read(two)
    grads = [torch.autograd.grad(mix, inputs(case), case.upstream) for mix, case in zip(mixes, (one, two), strict=True)]
    for case, grad in zip((one, two), grads, strict=True):
        assert same(grad, list(case.results(backend="triton").values())[1:])


@on_fp32
def test_backward_on_another_thread(target):
    case = make_case(3, (3, 32), 4, target)
    mix, grads = read(case), []
    thread = threading.Thread(target=lambda: grads.extend(torch.autograd.grad(mix, inputs(case), case.upstream)))
    thread.start()
    thread.join()
    assert same(grads, list(case.results(backend="triton").values())[1:])


@on_gpu
def test_two_threads_at_once():
    cases = [make_case(9, (64, 128), 4, ("cuda", torch.bfloat16), seed=seed) for seed in range(2)]
    expected = [case.results(backend="triton") for case in cases]
    results = [[], []]

    def work(n):
        results[n].extend(cases[n].results(backend="triton") for _ in range(20))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for runs, wanted in zip(results, expected, strict=True):
        assert len(runs) == 20
        assert all(same(run.values(), wanted.values()) for run in runs)


@on_fp32
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_gradients_equal_plain_ones_bit_for_bit(use_reentrant, target):
    case = make_case(3, (3, 32), 4, target)

    def block(query, *sources):
        return depth_mix(sources, query, num_heads=4, backend="triton").tanh()

    arguments = [case.query, *case.sources]
    plain = torch.autograd.grad(block(*arguments), arguments, case.upstream)
    checkpoint(block, *arguments, use_reentrant=use_reentrant).backward(case.upstream)
    assert same(plain, [argument.grad for argument in arguments])


@on_fp32
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "operator"])
@pytest.mark.parametrize("of", ["query", "source"])
def test_differentiating_twice_raises(of, compiled, target):
    case = make_case(3, (3, 32), 4, target)
    mix = register.depth_mix(list(case.sources), case.query, 4, 1e-6)[0] if compiled else read(case)
    leaf = case.query if of == "query" else case.sources[1]
    (grad,) = torch.autograd.grad(mix, leaf, case.upstream, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        grad.sum().backward()


@on_fp32
@pytest.mark.parametrize("N", [1, 3])
def test_the_mix_shares_no_memory_with_a_source(N, target):
    case = make_case(N, (3, 32), 4, target)
    mix = read(case)
    assert all(mix is not source and mix.data_ptr() != source.data_ptr() for source in case.sources)
    with torch.no_grad():
        before = case.sources[0].clone()
        mix.zero_()
        assert torch.equal(case.sources[0], before)


@on_fp32
def test_a_source_changed_in_place_before_the_backward_raises(target):
    case = make_case(3, (3, 32), 4, target)
    mix = read(case)
    with torch.no_grad():
        case.sources[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        mix.backward(case.upstream)


@on_fp32
def test_only_inputs_output_and_two_small_statistics_are_kept(target):
    case = make_case(5, (3, 32), 4, target)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        mix = depth_mix(case.sources, case.query, num_heads=4, backend="triton")
    new = [tensor.numel() for tensor in kept if not any(tensor is source for source in case.sources)]
    tokens = mix.numel() // 32
    # scale * query keeps nothing of its own; then the weight, the mix, the log-sum-exps and 1 / rms of each source
    assert sum(new) <= mix.numel() + tokens * (4 + 5) + 2 * 32


@pytest.mark.parametrize("target", [INTERPRETER])
@pytest.mark.parametrize("N", [1, 3])
def test_the_registered_operators_keep_pytorchs_rules(N, target):
    case = make_case(N, (3, 32), 4, target)
    torch.library.opcheck(register.depth_mix, (list(case.sources), case.query, 4, 1e-6))
    _, lse, rstd = (t.detach() for t in register.depth_mix(list(case.sources), case.query, 4, 1e-6))
    sources = [source.detach() for source in case.sources]
    wanted = [n != 1 for n in range(N)]
    arguments = (case.upstream, sources, case.query.detach(), lse, rstd, 4, wanted)
    torch.library.opcheck(register.depth_mix_backward, arguments)


@on_every_target
def test_the_operator_and_the_eager_function_give_the_same_bits(target):
    case = make_case(3, (3, 32), 4, target)
    eager = register.fused_read(case.sources, case.query, 4, 1e-6)
    mix, lse, rstd = register.depth_mix(list(case.sources), case.query, 4, 1e-6)
    assert torch.equal(eager, mix)
    assert not lse.requires_grad
    assert not rstd.requires_grad
    leaves = [case.query, *case.sources]
    assert same(torch.autograd.grad(eager, leaves, case.upstream), torch.autograd.grad(mix, leaves, case.upstream))
