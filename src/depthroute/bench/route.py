"""All depth reads of one microbatch, forward and backward: correctness first, then time, bytes and memory.

    python -m depthroute.bench.route --out DIR [--shapes 100m 350m 1b] [--arms engine read reference compiled]
    python -m depthroute.bench.route --out DIR --sweep [--shapes 350m 1b]

Times are of a CUDA graph's replay and of eager launches, the map between the sites subtracted. No number is given for
an arm of a shape whose errors against fp64 are more than 1.5 times those of the reference in the same dtype, or whose
two runs differ in a bit.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthroute.bench import chains, timing
from depthroute.bench.chains import Chain, Shape
from depthroute.ops.two_phase.plan import Plan

ARMS = ("engine", "read", "reference", "compiled")
CHECKED_TOKENS = 96
ALLOWED = 1.5  # times the error of the reference in the same dtype
PHASES = ("merge_forward", "merge_backward", "inter_forward", "inter_backward")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def runner(arm: str) -> Callable[[Chain], Tensor]:
    """How an arm runs a chain."""
    if arm == "engine":
        return chains.with_engine
    if arm == "read":
        return functools.partial(chains.with_reads, read=chains.fused_read)
    if arm == "reference":
        return functools.partial(chains.with_reads, read=chains.reference_read)
    compiled = torch.compile(chains.stacked_read, dynamic=True)
    return functools.partial(
        chains.with_reads,
        read=lambda sources, site, heads: compiled(torch.stack(list(sources)), site.query, site.norm_weight, heads),
    )


def check(shape: Shape, dtype: torch.dtype, run: Callable[[Chain], Tensor], device: str = "cuda") -> dict[str, Any]:
    """Errors of the output and of all gradients against fp64, beside the reference's; whether two runs are equal."""
    chain = chains.make_chain(shape, dtype, device, tokens=min(CHECKED_TOKENS, shape.tokens))
    start = time.perf_counter()
    actual = chain.step(run)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    again = chain.step(run)
    exact = chain.double().step(runner("reference"))
    plain = chain.step(runner("reference"))
    errors, ratio = {}, 0.0
    for name, indices in _groups(len(exact)).items():
        ours, theirs = (_error([result[i] for i in indices], [exact[i] for i in indices]) for result in (actual, plain))
        errors[name] = {"ours": ours, "reference": theirs}
        # Below a few fp32 roundings the ratio says nothing.
        part = 0.0 if ours < 2e-6 else ours / max(theirs, 2e-6)
        ratio = max(ratio, part if part == part else float("inf"))
    equal = all(torch.equal(a, b) for a, b in zip(actual, again, strict=True))
    return {
        "errors": errors,
        "ratio": ratio,
        "equal_runs": equal,
        "green": equal and ratio <= ALLOWED,
        "first_call_s": seconds,
    }


def _groups(count: int) -> dict[str, list[int]]:
    return {
        "output": [0],
        "input gradient": [1],
        "query gradients": list(range(2, count, 2)),
        "norm weight gradients": list(range(3, count, 2)),
    }


def _error(actual: list[Tensor], exact: list[Tensor]) -> float:
    """Of several tensors at once: each difference over the norm of its own exact value, in the 2-norm."""
    squares = [
        float(((a.double() - b.double()).norm() / b.double().norm()).square())
        for a, b in zip(actual, exact, strict=True)
    ]
    return (sum(squares) / len(squares)) ** 0.5


def measure(name: str, shape: Shape, dtype: torch.dtype, arm: str, bandwidth: float) -> dict[str, Any]:
    """One row of the table."""
    run = runner(arm)
    row: dict[str, Any] = {"shape": name, "arm": arm, **vars(shape), "check": check(shape, dtype, run)}
    if not row["check"]["green"]:
        return row
    chain = chains.make_chain(shape, dtype, "cuda")
    call, alone = (lambda: chain.step(run)), (lambda: _map_step(chain))
    slow = arm in ("reference", "compiled")
    row["peak_memory"] = timing.peak_memory(call)
    row["eager_ms"] = timing.eager_times(call, 2 if slow else 7)._asdict()
    map_ms = timing.graph_times(alone).median
    graph = timing.graph_times(call, 2 if slow else 7, 1 if slow else 5)
    row["map_ms"] = map_ms
    row["graph_ms"] = {key: value - map_ms for key, value in graph._asdict().items()}
    if arm == "engine":
        rows = chains.engine_rows(Plan.full(shape.sites))
        row["rows"], row["bytes"] = rows, rows * shape.tokens * shape.width * chain.x.element_size()
        row["bandwidth_share"] = row["bytes"] / (row["graph_ms"]["median"] / 1e3) / bandwidth
    return row


def _map_step(chain: Chain) -> tuple[Tensor, ...]:
    out = chains.with_map_alone(chain)
    return torch.autograd.grad(out, [chain.x], chain.upstream)


def table(rows: list[dict[str, Any]]) -> str:
    """The results in a few lines."""
    lines = [f"{'shape':9s} {'arm':9s} {'graph ms (least-most)':>22s} {'eager ms':>9s} {'copy bw':>7s} {'MiB':>7s} "
             f"{'error/ref':>9s} {'first s':>7s}"]  # fmt: skip
    for row in rows:
        head = f"{row['shape']:9s} {row['arm']:9s} "
        if "skipped" in row:
            lines.append(head + row["skipped"])
            continue
        checked = row["check"]
        tail = f"{checked['ratio']:9.2f} {checked['first_call_s']:7.1f}"
        if not checked["green"]:
            why = "two runs differ" if not checked["equal_runs"] else "errors too large"
            lines.append(head + f"{why}: no numbers; {tail} {_largest(checked['errors'])}")
            continue
        graph = row["graph_ms"]
        span = f"{graph['median']:.3f} ({graph['least']:.3f}-{graph['most']:.3f})"
        share = f"{row['bandwidth_share']:7.0%}" if "bandwidth_share" in row else " " * 7
        memory = row["peak_memory"] / 2**20
        lines.append(head + f"{span:>22s} {row['eager_ms']['median']:9.2f} {share} {memory:7.0f} {tail}")
    return "\n".join(lines)


def _largest(errors: dict[str, dict[str, float]]) -> str:
    return ", ".join(f"{name} {pair['ours']:.1e}/{pair['reference']:.1e}" for name, pair in errors.items())


def run(out: Path, shapes: list[str], arms: list[str], dtype: str, budget: float) -> list[dict[str, Any]]:
    """Measure every arm on every shape, arm by arm, and write route.json; an arm past the budget is left out."""
    timing.require_cuda()
    begun = time.perf_counter()
    # An empty cache, so that the time to the first call is that of a fresh machine.
    with tempfile.TemporaryDirectory() as cache:
        _use_cache(cache)
        bandwidth = timing.copy_bandwidth()
        rows: list[dict[str, Any]] = []
        for arm in arms:
            for name in shapes:
                if time.perf_counter() - begun > budget:
                    rows.append({"shape": name, "arm": arm, "skipped": f"not measured: over {budget:.0f} s"})
                    continue
                rows.append(measure(name, chains.SHAPES[name], DTYPES[dtype], arm, bandwidth))
                torch.cuda.empty_cache()
                _write(out, dtype, bandwidth, rows)
    print(f"{timing.environment()['device']}, {dtype}, copy {bandwidth / 1e12:.2f} TB/s")
    print(table(rows))
    return rows


def _use_cache(folder: str) -> None:
    os.environ["TRITON_CACHE_DIR"] = folder


def _write(out: Path, dtype: str, bandwidth: float, rows: list[dict[str, Any]]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    result = {"environment": timing.environment(), "dtype": dtype, "copy_bandwidth": bandwidth, "rows": rows}
    (out / "route.json").write_text(json.dumps(result, indent=1))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="depthroute bench route", description="Measure all depth reads.")
    parser.add_argument("--out", type=Path, required=True, help="folder for route.json or sweep.json")
    parser.add_argument("--shapes", nargs="+", choices=list(chains.SHAPES), default=["100m", "350m", "1b"])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--budget", type=float, default=90.0, help="seconds after which no more arms are begun")
    parser.add_argument("--sweep", action="store_true", help="try settings of the kernels instead, and print the best")
    parser.add_argument("--phases", nargs="+", default=list(PHASES), choices=PHASES, help="what a sweep tries")
    options = parser.parse_args(arguments)
    if options.sweep:
        from depthroute.bench.sweep import sweep

        sweep(options.out, options.shapes, options.phases, DTYPES[options.dtype], options.budget)
    else:
        run(options.out, options.shapes, options.arms, options.dtype, options.budget)


if __name__ == "__main__":
    main()
