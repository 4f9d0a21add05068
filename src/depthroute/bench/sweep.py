"""Try settings of each kernel of the two phases on the device, and print the best of them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthroute.bench import timing
from depthroute.bench.chains import SHAPES, Shape
from depthroute.ops.two_phase.plan import Plan

WORKERS = 12
COPIES = 3  # sets of inputs to go round, so that the cache holds none of them whole
GRIDS: dict[str, dict[str, tuple[int, ...]]] = {
    "merge_forward": {"lane": (8, 16), "warps": (2, 4, 8)},
    "merge_backward": {"lane": (8, 16), "warps": (2, 4, 8), "registers": (96, 128, 168, 255)},
    "inter_forward": {"chunk": (64, 128), "part": (16, 32), "registers": (112, 128, 168)},
    "inter_backward": {"chunk": (64, 128), "part": (16, 32), "registers": (128, 168, 255)},
}


def candidates(phase: str) -> Iterator[dict[str, int]]:
    """Settings of one kernel to try, by the names that `settings.overriding` takes."""
    grid = GRIDS[phase]
    for values in itertools.product(*grid.values()):
        yield {f"{phase}_{name}": value for name, value in zip(grid, values, strict=True)}


def launch(phase: str, shape: Shape, dtype: torch.dtype) -> list[Callable[[], Any]]:
    """Calls of one kernel at its usual place in a chain, each on inputs of its own."""
    from depthroute.ops.kernels import two_phase as kernels

    plan = Plan.full(shape.sites)
    middle = plan.starts[len(plan.starts) // 2]
    start, end = plan.tile(middle)
    sites, finished = end - start, start
    merged = (sites + 1) // 2 + 1

    def row() -> Tensor:
        return torch.randn(shape.tokens, shape.width, device="cuda").to(dtype)

    def stat() -> Tensor:
        return torch.rand(shape.tokens, shape.heads, device="cuda")

    weight = torch.randn(sites, shape.width, device="cuda") * (shape.heads / shape.width) ** 0.5
    one, gamma = weight[0], torch.ones(shape.width, device="cuda", dtype=dtype)
    calls: list[Callable[[], Any]] = []
    for _ in range(COPIES):
        if phase.startswith("inter"):
            sources, rstd = [row() for _ in range(finished)], [stat() for _ in range(finished)]
            if phase == "inter_forward":
                calls.append(functools.partial(kernels.inter_forward, sources, rstd, weight, shape.heads))
                continue
            grads, dz, lse = ([make() for _ in range(sites)] for make in (row, stat, stat))
            sums, rstd_sums = [row() for _ in sources], [stat() for _ in sources]
            arguments: tuple[Any, ...] = (grads, dz, sources, rstd, weight, lse, shape.heads, sums, rstd_sums)
            calls.append(functools.partial(kernels.inter_backward, *arguments))
            continue
        sources, rstd = [row() for _ in range(merged)], [stat() for _ in range(merged - 1)]
        if phase == "merge_forward":
            arguments = (row(), stat(), sources, rstd, one, gamma, shape.heads, 1e-6, 1e-6)
            calls.append(functools.partial(kernels.merge_forward, *arguments))
            continue
        raws = torch.stack([stat() for _ in sources])
        arguments = (row(), stat(), row(), stat(), stat(), stat(), raws, sources, rstd, one, gamma, shape.heads, 1e-6,
                     [row() for _ in sources], [stat() for _ in rstd])  # fmt: skip
        calls.append(functools.partial(kernels.merge_backward, *arguments))
    return calls


def attempt(job: tuple[str, str, torch.dtype, dict[str, int]], timed: bool) -> float | None:
    """Milliseconds of one launch under these settings; None where they cannot run or, unless `timed`, at all."""
    from triton.runtime.errors import OutOfResources

    from depthroute.ops.kernels.settings import overriding

    phase, name, dtype, settings = job
    with overriding(**settings), contextlib.suppress(OutOfResources, RuntimeError):
        calls = launch(phase, SHAPES[name], dtype)
        if not timed:
            calls[0]()
            torch.cuda.synchronize()
            return None
        return timing.graph_times(lambda: [call() for call in calls], 3, 3).median / len(calls)
    return None


def _compile(job: tuple[str, str, torch.dtype, dict[str, int]]) -> None:
    attempt(job, timed=False)


def sweep(out: Path, shapes: list[str], phases: list[str], dtype: torch.dtype, budget: float) -> None:
    """Time every candidate on every shape; sweep.json has all of them, the output the best three beside the default."""
    timing.require_cuda()
    begun = time.perf_counter()
    jobs = [(phase, name, dtype, settings) for phase in phases for name in shapes for settings in candidates(phase)]
    # Compiling is most of the time: several processes fill the cache on disk first.
    with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
        pool.map(_compile, jobs, chunksize=4)
    print(f"compiled {len(jobs)} settings in {time.perf_counter() - begun:.0f} s")
    results: list[dict[str, Any]] = []
    for phase, name, _, settings in jobs:
        if time.perf_counter() - begun > budget:
            print(f"stopped after {budget:.0f} s")
            break
        milliseconds = attempt((phase, name, dtype, settings), timed=True)
        results.append({"shape": name, "phase": phase, "settings": settings, "ms": milliseconds})
    out.mkdir(parents=True, exist_ok=True)
    (out / "sweep.json").write_text(json.dumps({"environment": timing.environment(), "results": results}, indent=1))
    for name, phase in itertools.product(shapes, phases):
        ran = [each for each in results if each["shape"] == name and each["phase"] == phase and each["ms"] is not None]
        for each in sorted(ran, key=lambda each: each["ms"])[:3]:
            chosen = " ".join(f"{key.removeprefix(phase + '_')}={value}" for key, value in each["settings"].items())
            print(f"{name:8s} {phase:15s} {each['ms'] * 1e3:7.1f} us  {chosen}")
