"""Times each kernel of the two phases at its usual place in a chain: python run.py OUT.json

With the package to be timed on PYTHONPATH (`git worktree` for another commit); a minute on one GPU, most of it
compiling. Microseconds, medians of CUDA-graph replays over three sets of inputs in turn (one for 8b), without sums so
far, as under torch.compile, and with them, as in eager mode.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from depthroute.bench import timing
from depthroute.bench.chains import SHAPES
from depthroute.bench.sweep import launch
from depthroute.files import write_json
from depthroute.ops.kernels import two_phase as kernels

NAMES = ("100m", "350m", "1b", "100m-x4", "350m-x4", "1b-x4")
PHASES = ("merge_forward", "merge_backward", "inter_forward", "inter_backward")
EIGHT_BILLION = {"tokens": 8192, "width": 4096, "heads": 8, "sites": 8}


def calls_of(phase: str, name: str, sums: bool) -> list[Callable[[], Any]]:
    calls = launch(phase, SHAPES[name], torch.bfloat16)
    if phase.endswith("backward") and not sums:  # which are the last two arguments
        calls = [functools.partial(call.func, *call.args[:-2]) for call in calls]  # type: ignore[attr-defined]
    return calls


def gated_inter(phase: str, sources: int) -> list[Callable[[], Any]]:
    """The inter reads of `delta_mhar` at 8 B parameters; exact backward."""
    tokens, width, heads, sites = EIGHT_BILLION.values()

    def row() -> torch.Tensor:
        return torch.randn(tokens, width, device="cuda").bfloat16()

    def stat() -> torch.Tensor:
        return torch.rand(tokens, heads, device="cuda")

    weight = torch.randn(sites, width, device="cuda") * (heads / width) ** 0.5
    rows, rstd = [row() for _ in range(sources)], [stat() for _ in range(sources)]
    if phase == "inter_forward":
        return [functools.partial(kernels.inter_forward, rows, rstd, weight, heads)]
    grads, lse_grads, lse = ([make() for _ in range(sites)] for make in (row, stat, stat))
    return [functools.partial(kernels.inter_backward, grads, lse_grads, rows, rstd, weight, lse, heads, (), (), True)]


def microseconds(calls: list[Callable[[], Any]]) -> float:
    return 1e3 * timing.graph_times(lambda: [call() for call in calls], 3, 7).median / len(calls)


def main(out: Path) -> None:
    timing.require_cuda()
    found: dict[str, dict[str, float]] = {}
    for phase in PHASES:
        for name in NAMES:
            for sums in (False, True) if phase.endswith("backward") else (False,):
                key = phase + (", sums" if sums else "")
                found.setdefault(key, {})[name] = microseconds(calls_of(phase, name, sums))
        if phase.startswith("inter"):
            for sources in (5, 9):
                found[phase][f"8b, {sources} sources"] = microseconds(gated_inter(phase, sources))
    write_json(out, {"environment": timing.environment(), "copy": timing.copy_bandwidth(), "microseconds": found})
    for key, numbers in found.items():
        print(f"{key:22s}", "  ".join(f"{name} {value:.1f}" for name, value in numbers.items()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
