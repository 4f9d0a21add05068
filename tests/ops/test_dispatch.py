"""What depth_mix accepts, which code it runs, and how it says no."""

import subprocess
import sys

import pytest
import torch

import depthroute.ops
from depthroute.ops import depth_mix
from ops.cases import CUDA, INTERPRETER, make_case, on_gpu

SOURCES = [torch.ones(2, 8), torch.ones(2, 8)]
QUERY = torch.zeros(8)


@pytest.mark.parametrize(
    ("sources", "options", "error", "message"),
    [
        ([], {}, ValueError, "sources must hold at least one tensor, got none"),
        (torch.ones(0, 2, 8), {}, ValueError, "sources must hold at least one tensor, got none"),
        (torch.ones(8), {}, ValueError, r"must have shape \(N, ..., D\), got \(8,\)"),
        ([torch.ones(2, 0)], {}, ValueError, r"must have shape \(..., D\) with D >= 1, got \(2, 0\)"),
        ([torch.tensor(1.0)], {}, ValueError, r"must have shape \(..., D\) with D >= 1, got \(\)"),
        (iter(SOURCES), {}, TypeError, "sources must be a list or tuple of tensors or one tensor, got list_iterator"),
        ([SOURCES[0], None], {}, TypeError, r"sources\[1\] must be a tensor, got NoneType"),
        ([*SOURCES, torch.ones(2, 9)], {}, ValueError, r"sources\[2\] must have shape \(2, 8\).*got \(2, 9\)"),
        ([*SOURCES, torch.ones(3, 8)], {}, ValueError, r"sources\[2\] must have shape \(2, 8\).*got \(3, 8\)"),
        ([*SOURCES, torch.ones(1, 8)], {}, ValueError, r"sources\[2\] must have shape \(2, 8\).*got \(1, 8\)"),
        ([*SOURCES, SOURCES[0].bfloat16()], {}, TypeError, r"sources\[2\] must be torch.float32.*got torch.bfloat16"),
        ([*SOURCES, SOURCES[0].to("meta")], {}, ValueError, r"sources\[2\] must be on cpu.*got meta"),
        ([SOURCES[0].long()], {}, TypeError, r"sources\[0\] must be float32.*got torch.int64"),
        (SOURCES, {"query": torch.zeros(9)}, ValueError, r"query must have shape \(8,\).*got \(9,\)"),
        (SOURCES, {"query": torch.zeros(2, 4)}, ValueError, r"query must have shape \(8,\).*got \(2, 4\)"),
        (
            SOURCES,
            {"query": torch.zeros(8).long()},
            TypeError,
            "query must be of a floating-point type, got",
        ),
        (SOURCES, {"query": torch.zeros(8, device="meta")}, ValueError, "query must be on cpu.*got meta"),
        (SOURCES, {"query": [0.0] * 8}, TypeError, "query must be a tensor, got list"),
        (SOURCES, {"norm_weight": torch.ones(4)}, ValueError, r"norm_weight must have shape \(8,\).*got \(4,\)"),
        (SOURCES, {"norm_weight": 1.0}, TypeError, "norm_weight must be a tensor, got float"),
        (SOURCES, {"num_heads": 3}, ValueError, "num_heads must be at least 1 and divide the width 8, got 3"),
        (SOURCES, {"num_heads": 0}, ValueError, "num_heads must be at least 1 and divide the width 8, got 0"),
        (SOURCES, {"num_heads": 2.0}, TypeError, "num_heads must be an int, got float"),
        (SOURCES, {"eps": -1e-6}, ValueError, "eps must not be negative, got -1e-06"),
        (SOURCES, {"eps": "small"}, TypeError, "eps must be a number, got str"),
        (SOURCES, {"scale": float("nan")}, ValueError, "scale must be finite, got nan"),
        (SOURCES, {"backend": "tritn"}, ValueError, "unknown backend 'tritn'; did you mean 'triton'?"),
    ],
)
def test_a_wrong_argument_is_named_with_what_came_and_what_is_wanted(sources, options, error, message):
    with pytest.raises(error, match=message):
        depth_mix(sources, **{"query": QUERY, **options})


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_wrong_sources_are_refused_before_any_backend_runs(backend):
    with pytest.raises(ValueError, match=r"sources\[1\] must have shape"):
        depth_mix([torch.ones(2, 8), torch.ones(1, 8)], QUERY, backend=backend)


def test_forced_triton_raises_on_a_cpu_without_the_interpreter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(RuntimeError, match="backend 'triton' cannot run here: the sources are on cpu"):
        depth_mix(SOURCES, QUERY, backend="triton")


def test_forced_triton_raises_where_triton_is_not_installed(monkeypatch):
    monkeypatch.setattr(depthroute.ops, "_TRITON_INSTALLED", False)
    with pytest.raises(RuntimeError, match="Triton is not installed"):
        depth_mix(SOURCES, QUERY, backend="triton")


@pytest.mark.parametrize("target", [INTERPRETER, CUDA[0]])
def test_forced_triton_raises_rather_than_return_no_weights(target):
    case = make_case(2, (2, 8), 1, target)
    with pytest.raises(RuntimeError, match="return_weights=True needs the reference"):
        depth_mix(case.sources, case.query, return_weights=True, backend="triton")


@pytest.mark.parametrize("target", [INTERPRETER, CUDA[0]])
def test_forced_triton_raises_rather_than_round_fp64(target):
    case = make_case(2, (2, 8), 1, target).double()
    with pytest.raises(RuntimeError, match="the sources are float64"):
        depth_mix(case.sources, case.query, backend="triton")


def test_auto_is_the_reference_on_a_cpu_even_where_kernels_are_interpreted(monkeypatch):
    monkeypatch.setattr(depthroute.ops, "fused_read", None)
    assert depth_mix(SOURCES, QUERY).shape == (2, 8)


@on_gpu
def test_auto_is_triton_on_a_gpu_and_the_reference_for_what_triton_cannot_do(monkeypatch):
    case = make_case(2, (2, 8), 1, ("cuda", torch.bfloat16))
    automatic = depth_mix(case.sources, case.query)
    assert torch.equal(automatic, depth_mix(case.sources, case.query, backend="triton"))
    monkeypatch.setattr(depthroute.ops, "fused_read", None)
    depth_mix(case.sources, case.query, return_weights=True)
    depth_mix(case.double().sources, case.double().query)
    with pytest.raises(TypeError):
        depth_mix(case.sources, case.query)


def test_the_operator_works_without_triton():
    script = """
import importlib.abc, importlib.util, sys

class NoTriton(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(name)

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "triton" else find_spec(name, package)
sys.meta_path.insert(0, NoTriton())

import torch
from depthroute.ops import depth_mix

assert depth_mix([torch.ones(2, 8)] * 3, torch.zeros(8)).shape == (2, 8)
try:
    depth_mix([torch.ones(2, 8)] * 3, torch.zeros(8), backend="triton")
except RuntimeError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "backend 'triton' cannot run here: Triton is not installed"
