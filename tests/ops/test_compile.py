"""The read under torch.compile: one graph, any length, autocast, checkpoints."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from depthroute.ops import depth_mix
from ops.cases import CUDA, INTERPRETER, make_case, on_fp32, relative_error


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def model(backend, case):
    def forward(query, norm_weight, *sources):
        mix = depth_mix(sources, query, num_heads=case.num_heads, norm_weight=norm_weight, scale=0.5, backend=backend)
        return mix * 2 + sources[0]

    return forward


def gradients(function, case):
    leaves = [case.query, case.norm_weight, *case.sources]
    output = function(*leaves)
    return [output, *torch.autograd.grad(output, leaves, case.upstream)]


@pytest.mark.parametrize("backend", ["reference", "triton"])
@on_fp32
def test_fullgraph_gives_what_eager_gives(backend, target):
    case = make_case(3, (5, 32), 4, target)
    function = model(backend, case)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients(compiled, case), gradients(function, case))


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("target", CUDA[:2])
def test_fullgraph_through_inductor(backend, target):
    case = make_case(3, (2, 5, 32), 4, target)
    function = model(backend, case)
    compiled = torch.compile(function, fullgraph=True)
    for actual, expected in zip(gradients(compiled, case), gradients(function, case), strict=True):
        assert relative_error(actual, expected) < (1e-5 if target[1] == torch.float32 else 5e-3)


@on_fp32
def test_dynamic_lengths_share_one_graph(target):
    counter = CompileCounterWithBackend("aot_eager")
    function = model("triton", make_case(3, (5, 32), 4, target))
    compiled = torch.compile(function, fullgraph=True, backend=counter, dynamic=True)
    graphs = []
    for tokens in (5, 3, 7):
        case = make_case(3, (tokens, 32), 4, target)
        torch.testing.assert_close(gradients(compiled, case), gradients(function, case))
        graphs.append(counter.frame_count)
    assert graphs == graphs[:1] * 3


@on_fp32
def test_a_chain_of_many_reads_is_one_graph(target):
    counter = CompileCounterWithBackend("aot_eager")
    case = make_case(1, (1, 16), 2, target)

    def chain(query, x):
        sources = (x,)
        for _ in range(9):
            sources = (*sources, depth_mix(sources, query, num_heads=2, backend="triton").sin())
        return sources[-1]

    compiled = torch.compile(chain, fullgraph=True, backend=counter)
    with torch.no_grad():
        torch.testing.assert_close(compiled(case.query, case.sources[0]), chain(case.query, case.sources[0]))
    assert counter.frame_count == 1


@on_fp32
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_checkpoint_and_autocast_inside_a_compiled_graph(autocast, target):
    case = make_case(3, (5, 32), 4, target)
    function = model("triton", case)

    def checkpointed(*arguments):
        with torch.autocast(target[0], torch.bfloat16, enabled=autocast):
            return checkpoint(function, *arguments, use_reentrant=False)

    compiled = torch.compile(checkpointed, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients(compiled, case), gradients(function, case))


@pytest.mark.parametrize("target", [INTERPRETER, *CUDA])
def test_partial_backward_of_a_compiled_read(target):
    case = make_case(3, (5, 32), 4, target)
    frozen = [case.sources[0].detach(), *case.sources[1:]]
    function = model("triton", case)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    expected = function(case.query, case.norm_weight, *frozen)
    actual = compiled(case.query, case.norm_weight, *frozen)
    leaves = [case.query, *case.sources[1:]]
    torch.testing.assert_close(
        torch.autograd.grad(actual, leaves, case.upstream), torch.autograd.grad(expected, leaves, case.upstream)
    )
