"""The engine against chains that read site by site, in fp64 with the plain bodies."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from depthroute.ops.two_phase import algebra, gated_merge, inter, merge, spread
from depthroute.ops.two_phase.engine import fusable_eps
from depthroute.ops.two_phase.operators import Operators
from depthroute.ops.two_phase.plan import Plan
from ops.engine_chains import Qwen3RMSNorm, error, gradients, inputs, make, results

EXACT = 1e-12


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def rstd(source, heads):
    return torch.rsqrt(source.square().mean(-1, keepdim=True) + 1e-6).expand(*source.shape[:-1], heads)


@pytest.mark.parametrize(
    ("sites", "tiles", "heads"),
    [(1, 1, 2), (2, 1, 1), (2, 2, 3), (9, 3, 1), (9, 1, 4), (9, 9, 2), (13, 5, 6), (33, 6, 2)],
)
def test_output_and_every_gradient_equal_those_of_reads_one_by_one(sites, tiles, heads):
    plan = Plan.of_tiles(sites, tiles)
    chain, reference = (make(sites, heads=heads, plan=plan, mode=mode) for mode in ("plain", "reference"))
    assert error(results(chain, *inputs()), results(reference, *inputs())) <= EXACT


@pytest.mark.parametrize(("sites", "block"), [(5, 1), (9, 4), (11, 4), (25, 10)])
def test_chains_of_block_sums_equal_reads_one_by_one(sites, block):
    chain, reference = (make(sites, block=block, mode=mode) for mode in ("plain", "reference"))
    assert error(results(chain, *inputs()), results(reference, *inputs())) <= EXACT


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_gradients_equal_plain_ones_bit_for_bit(use_reentrant):
    x, upstream = inputs()
    plain = results(make(9), x, upstream)
    checkpointed = make(9, checkpointed=use_reentrant)
    assert torch.equal(checkpointed(x), plain[0])
    checkpointed.zero_grad()
    x.grad = None
    (checkpointed(x) * upstream).sum().backward()
    for actual, expected in zip([x, *checkpointed.parameters()], plain[1:], strict=True):
        assert torch.equal(actual.grad, expected)


@pytest.mark.parametrize("picked", [[0], [3], [4], [7], [2, 6], [0, 5]])
def test_a_loss_on_inner_sources_gives_the_right_gradients(picked):
    x, upstream = inputs()
    found = []
    for mode in ("plain", "reference"):
        chain, tap = make(9, mode=mode), []
        chain(x, tap)
        found.append(gradients(sum((tap[i] * upstream).sum() for i in picked), chain, x))
    assert error(*found) <= EXACT


def test_sources_in_the_state_lead_to_the_same_gradients_as_the_tensors_that_were_written():
    x, upstream = inputs()
    chain = make(9)
    state = chain.engine.start(x)
    written = [x]
    for site in range(8):
        mix, state = chain.engine.read(state, site, chain.reads)
        written.append(chain.sublayer(mix, site))
        state = chain.engine.write(state, written[-1], site)
    for source, y in zip(state, written, strict=False):
        assert torch.equal(source, y)
        by_state, directly = (gradients((t * upstream).sum(), chain, x, retain_graph=True) for t in (source, y))
        assert error(by_state, directly) <= EXACT


def test_a_graph_can_be_used_twice_and_in_parts():
    x, upstream = inputs()
    chain, reference = make(9), make(9, mode="reference")
    tap, expected_tap = [], []
    out, expected = chain(x, tap), reference(x, expected_tap)
    for ours, theirs in ((tap[4], expected_tap[4]), (out, expected), (out, expected), (tap[6], expected_tap[6])):
        actual = gradients((ours * upstream).sum(), chain, x, retain_graph=True)
        wanted = gradients((theirs * upstream).sum(), reference, x, retain_graph=True)
        assert error(actual, wanted) <= EXACT


def test_two_models_interleaved_and_one_model_twice_in_a_graph():
    x, upstream = inputs()
    one, other = make(9), make(9, seed=5)
    a, b = one(x), other(x)
    b = gradients((b * upstream).sum(), other, x)
    a = gradients((a * upstream).sum(), one, x)
    assert error(a, results(make(9, mode="reference"), x, upstream)[1:]) <= EXACT
    assert error(b, results(make(9, seed=5, mode="reference"), x, upstream)[1:]) <= EXACT
    reference = make(9, mode="reference")
    twice = gradients((one(one(x)) * upstream).sum(), one, x)
    assert error(twice, gradients((reference(reference(x)) * upstream).sum(), reference, x)) <= EXACT


def test_two_threads_do_not_disturb_each_other():
    expected = {seed: results(make(9, seed=seed, mode="reference"), *inputs()) for seed in (0, 1)}
    worst = {}

    def work(seed):
        chain = make_chains[seed]
        worst[seed] = max(error(results(chain, *inputs()), expected[seed]) for _ in range(5))

    make_chains = {seed: make(9, seed=seed) for seed in (0, 1)}
    threads = [threading.Thread(target=work, args=(seed,)) for seed in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert worst.keys() == {0, 1}
    assert max(worst.values()) <= EXACT


@pytest.mark.parametrize("checkpointed", [None, False])
def test_compiles_as_one_graph(checkpointed):
    torch._dynamo.reset()
    x, upstream = inputs()
    chain = make(7, checkpointed=checkpointed)
    compiled = torch.compile(chain, fullgraph=True, backend="aot_eager")
    out = compiled(x)
    actual = [out.detach(), *gradients((out * upstream).sum(), chain, x)]
    assert error(actual, results(make(7, mode="reference"), x, upstream)) <= EXACT


def test_the_compiler_sums_the_gradients_of_sources_and_the_kernels_those_of_rstd(monkeypatch):
    torch._dynamo.reset()
    sums = {"sources": 0, "rstd": 0}
    backward = Operators.merge_backward

    def counted(bodies, *arguments):
        for name, addends in zip(sums, arguments[-3:-1], strict=True):
            sums[name] += sum(addend is not None for addend in addends)
        return backward(bodies, *arguments)

    monkeypatch.setattr(Operators, "merge_backward", counted)
    x, upstream = inputs()
    (torch.compile(make(7), fullgraph=True, backend="aot_eager")(x) * upstream).sum().backward()
    assert sums["sources"] == 0 < sums["rstd"]


def test_compiled_partial_backward_gives_the_right_gradients():
    torch._dynamo.reset()
    x, upstream = inputs()
    chain, reference = make(7), make(7, mode="reference")

    def inner(chain):
        tap = []
        chain(x, tap)
        return tap[4]

    compiled = torch.compile(inner, fullgraph=True, backend="aot_eager")
    actual = gradients((compiled(chain) * upstream).sum(), chain, x)
    assert error(actual, gradients((inner(reference) * upstream).sum(), reference, x)) <= EXACT


def test_a_compiled_graph_is_kept_for_the_next_process():
    x, upstream = inputs()
    chain = make(4)
    with fresh_cache():
        for found in ({"autograd_cache_miss", "autograd_cache_saved"}, {"autograd_cache_hit"}):
            torch._dynamo.reset()
            counters.clear()
            actual = gradients((torch.compile(chain, fullgraph=True)(x) * upstream).sum(), chain, x)
            assert {name for name in counters["aot_autograd"] if name.startswith("autograd_cache")} == found
    assert error(actual, results(make(4, mode="reference"), x, upstream)[1:]) <= EXACT


def test_a_second_derivative_is_refused():
    x, upstream = inputs()
    loss = (make(5)(x) * upstream).sum()
    with pytest.raises(RuntimeError, match="no second derivative, and create_graph=True asks for one"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_without_gradients_the_result_is_the_same():
    x, _ = inputs()
    chain = make(9)
    with torch.no_grad():
        out = chain(x)
    assert torch.equal(out, chain(x))


def test_the_first_site_reads_its_only_source_exactly():
    x, _ = inputs(dtype=torch.float32)
    chain = make(3, dtype=torch.float32)
    assert torch.equal(chain.engine.read(chain.engine.start(x), 0, chain.reads)[0], x)


def test_the_state_is_a_flat_tuple_that_is_not_changed_and_begins_with_the_sources():
    chain = make(9)
    state = chain.engine.start(inputs()[0])
    for site in range(8):
        before = tuple(tensor.clone() for tensor in state)
        mix, after = chain.engine.read(state, site, chain.reads)
        assert all(isinstance(tensor, torch.Tensor) for tensor in after)
        assert all(torch.equal(a, b) for a, b in zip(before, state, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(state[: site + 1], after[: site + 1], strict=True))
        state = chain.engine.write(after, mix.sin(), site)
        assert torch.equal(state[site + 1], mix.sin())


@pytest.mark.parametrize("run", ["eager", "compiled"])
def test_the_weights_gradients_of_a_tile_are_summed_at_once(run, monkeypatch):
    calls = []
    owner = Operators if run == "compiled" else algebra
    whole = owner.sum_weights
    monkeypatch.setattr(owner, "sum_weights", lambda *arguments: calls.append(arguments) or whole(*arguments))
    torch._dynamo.reset()
    x, upstream = inputs()
    chain = make(9)
    compiled = torch.compile(chain, fullgraph=True, backend="aot_eager") if run == "compiled" else chain
    (compiled(x) * upstream).sum().backward()
    assert len(calls) == len(chain.engine.plan.starts)
    assert all(part is not None for *_, parts in calls for part in parts)


@pytest.mark.parametrize("sites", [(0,), (1, 2)])
def test_spread_weights_give_the_gradients_of_whole_ones(sites):
    """Of a tile of which only some sites are read."""

    def gradient(spread_out):
        torch.manual_seed(0)
        weight, sources = leaf(3, 6), [leaf(4, 6) for _ in range(3)]
        of_inter, of_merges = spread(weight, sources[0], 2, False) if spread_out else (weight, weight.unbind(0))
        partials, lses, _, _ = inter(sources[:2], [rstd(s, 2) for s in sources[:2]], of_inter, 2, False)
        outs = [
            merge(partials[i], lses[i], sources[2:], (), of_merges[i], 2, 1e-6, kernels=False).out.sin() for i in sites
        ]
        return torch.autograd.grad(sum(outs).sum(), (weight, *sources))

    assert error(gradient(True), gradient(False)) <= EXACT


@pytest.mark.parametrize(("finished", "local"), [(0, 1), (0, 3), (4, 1), (3, 2)])
def test_gradients_of_inter_and_merge_with_a_norm_pass_gradcheck(finished, local):
    def read(weight, gamma, *sources):
        partial = lse = None
        if finished:
            known = [rstd(source, 2) for source in sources[:finished]]
            (partial,), (lse,), _, _ = inter(sources[:finished], known, weight.unsqueeze(0), 2, False)
        own, known, outs = (), (), []
        for i, source in enumerate(sources[finished:]):
            merged = merge(
                partial, lse, (*own, source), known, weight, 2, 1e-6,
                norm_weight=gamma if i % 2 == 0 else None, norm_eps=1e-5, kernels=False,
            )  # fmt: skip
            own, known = merged.sources, merged.rstd
            outs.append(merged.out.sin())
        return sum(outs)

    torch.manual_seed(0)
    tensors = [leaf(6), leaf(6), *(leaf(3, 6) for _ in range(finished + local))]
    assert torch.autograd.gradcheck(read, tensors)


@pytest.mark.parametrize("used", [1, 2])
def test_gradients_of_the_gated_form_pass_gradcheck_eagerly_and_compiled(used):
    def read(stream, gate, null, one, other, *sources):
        known = [rstd(source, 2) for source in sources]
        partials, lses, _, _ = inter(sources, known, torch.stack([one, other]), 2, False, exact=True)
        for partial, lse, weight in list(zip(partials, lses, (one, other), strict=True))[:used]:
            stream = gated_merge(stream, gate, partial, lse, null, weight, 2, 1e-6, kernels=False).sin()
        return stream

    torch.manual_seed(0)
    tensors = [leaf(3, 6), leaf(1), leaf(6), leaf(6), leaf(6), leaf(3, 6), leaf(3, 6)]
    assert torch.autograd.gradcheck(read, tensors)
    torch._dynamo.reset()
    assert torch.autograd.gradcheck(torch.compile(read, fullgraph=True, backend="aot_eager"), tensors)


def test_the_gated_form_is_the_stream_plus_the_gated_read_with_the_null_source():
    from depthroute.ops import depth_mix

    torch.manual_seed(0)
    stream, gate, null, weight, *sources = leaf(3, 6), leaf(1), leaf(6), leaf(6), leaf(3, 6), leaf(3, 6)
    known = [rstd(source, 2) for source in sources]
    partials, lses, _, _ = inter(sources, known, weight.unsqueeze(0), 2, False, exact=True)
    out = gated_merge(stream, gate, partials[0], lses[0], null, weight, 2, 1e-6, kernels=False)
    mix = depth_mix([null.expand(3, 6), *sources], weight, num_heads=2, eps=1e-6)
    torch.testing.assert_close(out, stream + gate * mix, rtol=1e-12, atol=1e-12)


def test_a_norm_of_a_known_class_is_fused_and_any_other_is_called():
    x, upstream = inputs(dtype=torch.float32)
    chain, reference = (make(5, norm=True, dtype=torch.float32, mode=mode) for mode in ("plain", "reference"))
    assert error(results(chain, x, upstream), results(reference, x, upstream)) <= 1e-5
    norm = chain.norms[0]
    assert fusable_eps(norm, x) == norm.variance_epsilon
    assert fusable_eps(norm, x.double()) is None
    assert fusable_eps(norm, x.bfloat16()) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert fusable_eps(norm, x.bfloat16()) == norm.variance_epsilon
    assert fusable_eps(torch.nn.RMSNorm(12), x) is None
    handle = norm.register_forward_hook(lambda *_: None)
    assert fusable_eps(norm, x) is None
    handle.remove()
    norm.forward = lambda x: x
    assert fusable_eps(norm, x) is None


def test_the_fused_norm_rounds_as_the_module_does():
    torch.manual_seed(0)
    norm, x = Qwen3RMSNorm(64).bfloat16(), torch.randn(7, 64).bfloat16()
    assert torch.equal(algebra.rms_norm(x, norm.weight, norm.variance_epsilon), norm(x))


def sizes_of(plan):
    return [plan.tile(start)[1] - start for start in plan.starts]


@pytest.mark.parametrize("sites", [1, 2, 5, 25, 33, 49, 73, 100, 129, 257, 400])
def test_tiles_cover_every_site_once_and_fit_the_kernels(sites):
    plan = Plan.full(sites)
    sizes = sizes_of(plan)
    assert list(plan.starts) == [sum(sizes[:i]) for i in range(len(sizes))]
    assert sum(sizes) == sites
    assert sizes == sorted(sizes)
    assert max(sizes) <= 16
    assert all(plan.tile(site) == plan.tile(plan.tile(site)[0]) for site in range(sites))


def test_tiles_of_the_papers_models():
    wanted = {25: (3, 4, 5, 6, 7), 49: (5, 6, 7, 7, 8, 8, 8), 73: (5, 6, 7, 7, 8, 8, 8, 8, 8, 8)}
    assert {sites: tuple(sizes_of(Plan.full(sites))) for sites in wanted} == wanted


@pytest.mark.parametrize(("sites", "tiles", "most"), [(3, 3, 8), (9, 3, 4), (12, 4, 8), (14, 4, 4), (16, 3, 7)])
def test_no_other_tiles_move_fewer_rows(sites, tiles, most):
    def rows(sizes):
        return sum(2 * size**2 + 4 * sum(sizes[:i]) for i, size in enumerate(sizes))

    others = itertools.product(range(1, most + 1), repeat=tiles)
    least = min(rows(sizes) for sizes in others if sum(sizes) == sites)
    assert rows(sizes_of(Plan.of_tiles(sites, tiles, most))) == least
