"""All depth reads of one microbatch, forward and backward: correctness first, then time, bytes and memory.

    python -m depthroute.bench.route --out DIR [--shapes 100m 350m 1b] [--arms engine engine-compiled read ...]
    python -m depthroute.bench.route --out DIR --shapes 100m-h1 350m-h1 1b-h1 --arms engine read peers
    python -m depthroute.bench.route --out DIR --shapes 8b-delta --arms engine engine-compiled reference
    python -m depthroute.bench.route --out DIR --sweep [--shapes 350m 1b]

Times are of a CUDA graph's replay and of eager launches, the map between the sites (compiled for engine-compiled)
subtracted from the former. No number is given for an arm of a shape whose errors against fp64 are more than 1.5 times
those of the reference in the same dtype, or whose two runs differ in a bit. Peers, other packages' operators, are held
to the same.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._inductor import config as inductor_config

from depthroute.bench import chains, deltas, peers, timing
from depthroute.bench.apart import run_apart
from depthroute.bench.chains import Chain, Shape
from depthroute.bench.options import positive
from depthroute.bench.together import Together
from depthroute.errors import in_one_line
from depthroute.files import new_folder
from depthroute.ops.two_phase.plan import Plan

ARMS = ("engine", "engine-compiled", "read", "reference", "compiled")
CHECKED_TOKENS = 96
ALLOWED = 1.5  # times the error of the reference in the same dtype
PHASES = ("merge_forward", "merge_backward", "inter_forward", "inter_backward")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def workload(shape: Shape) -> ModuleType:
    """What makes the chains of a shape and runs them."""
    return chains if shape.block is None else deltas


def obstacle(arm: str, shape: Shape) -> str | None:
    """Why an arm is not asked to run a shape; None where it is."""
    if shape.block is not None and arm not in deltas.ARMS:
        return f"not measured: gated reads have the arms {', '.join(deltas.ARMS)}"
    if arm in peers.PEERS and shape.heads != 1:
        return f"not measured: the peers are single-head, and the shape has H = {shape.heads}"
    return peers.missing(arm) if arm in peers.PEERS else None


def runner(arm: str, shape: Shape) -> Callable[[Any], Tensor]:
    """How an arm runs a chain of such a shape."""
    if arm == "engine":
        return workload(shape).with_engine
    if arm == "engine-compiled":
        return _compiled(workload(shape).with_engine)
    if arm == "reference":
        return workload(shape).with_reference
    if arm == "read":
        return functools.partial(chains.with_reads, read=chains.fused_read)
    if arm in peers.PEERS:
        return functools.partial(chains.with_reads, read=peers.read(arm))
    compiled = torch.compile(chains.stacked_read, dynamic=True)
    return functools.partial(
        chains.with_reads,
        read=lambda sources, site, heads: compiled(torch.stack(list(sources)), site.query, site.norm_weight, heads),
    )


def _compiled(run: Callable[[Chain], Tensor]) -> Callable[[Chain], Tensor]:
    """As a compiled model reads. One graph for any number of tokens, since the checks have fewer."""
    torch._dynamo.reset()  # the compiler gives up after eight graphs of one function, and each shape has its own
    inductor_config.autotune_local_cache = False  # what it finds fastest while others run is not kept
    compiled = torch.compile(run, fullgraph=True)

    def marked(chain: Chain) -> Tensor:
        torch._dynamo.maybe_mark_dynamic(chain.x, 0)
        return compiled(chain)

    return marked


def check(shape: Shape, dtype: torch.dtype, run: Callable[[Any], Tensor], device: str = "cuda") -> dict[str, Any]:
    """Errors of the output and of all gradients against fp64, beside the reference's; whether two runs are equal.

    The first call has all tokens of the shape: a compiler tunes its kernels for what it gets first.
    """
    work = workload(shape)
    seconds = _first_call(work.make_chain(shape, dtype, device), run)
    chain: Chain = work.make_chain(shape, dtype, device, tokens=min(CHECKED_TOKENS, shape.tokens))
    actual, again = chain.step(run), chain.step(run)
    exact = chain.double().step(work.with_reference)
    plain = chain.step(work.with_reference)
    errors, ratio = {}, 0.0
    for name, indices in _groups(chain).items():
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


def _first_call(chain: Chain, run: Callable[[Any], Tensor]) -> float:
    """Seconds of a step that compiles what there is to compile."""
    start = time.perf_counter()
    chain.step(run)
    if chain.x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _groups(chain: Chain) -> dict[str, list[int]]:
    """Where in what `step` gives the tensors of one kind lie."""
    kinds = list(vars(chain.reads[0]))
    end = 2 + len(kinds) * len(chain.reads)
    of_reads = {f"{kind.replace('_', ' ')} gradients": [*range(2 + i, end, len(kinds))] for i, kind in enumerate(kinds)}
    return {"output": [0], "input gradient": [1], **of_reads}


def _error(actual: list[Tensor], exact: list[Tensor]) -> float:
    """Of several tensors at once: each difference over the norm of its own exact value, in the 2-norm.

    Scalars are one vector: a single one may be nearly zero by chance.
    """
    if exact[0].numel() == 1:
        actual, exact = [torch.cat(actual)], [torch.cat(exact)]
    squares = [
        float(((a.double() - b.double()).norm() / b.double().norm()).square())
        for a, b in zip(actual, exact, strict=True)
    ]
    return (sum(squares) / len(squares)) ** 0.5


class Case(NamedTuple):
    """An arm at a shape."""

    name: str
    shape: Shape
    dtype: torch.dtype
    arm: str
    device: str = "cuda"

    @property
    def head(self) -> dict[str, Any]:
        """What a row begins with."""
        return {"shape": self.name, "arm": self.arm, **vars(self.shape)}


class Checked:
    """A case whose arm is compiled and checked; `measure` gives its row of the table."""

    def __init__(self, case: Case) -> None:
        self.case, self.run = case, runner(case.arm, case.shape)
        self.row = {**case.head, "check": check(case.shape, case.dtype, self.run, case.device)}

    def measure(self, bandwidth: float) -> dict[str, Any]:
        if self.row["check"]["green"]:
            # With the card to itself: a compiled arm comes from the compiler's cache, and tunes its kernels anew.
            self.run = runner(self.case.arm, self.case.shape)
            self._add_times(bandwidth)
            torch.cuda.empty_cache()
        return self.row

    def _add_times(self, bandwidth: float) -> None:
        _, shape, dtype, arm, device = self.case
        row, work = self.row, workload(shape)
        chain: Chain = work.make_chain(shape, dtype, device)
        join = torch.compile(work.join) if arm == "engine-compiled" else work.join
        call, alone = (lambda: chain.step(self.run)), (lambda: _map_step(chain, join))
        slow = arm in ("reference", "compiled")
        row["peak_memory"] = timing.peak_memory(call)
        row["eager_ms"] = timing.eager_times(call, 2 if slow else 7)._asdict()
        map_ms = timing.graph_times(alone).median
        graph = timing.graph_times(call, 2 if slow else 7, 1 if slow else 5)
        row["map_ms"] = map_ms
        row["graph_ms"] = {key: value - map_ms for key, value in graph._asdict().items()}
        if arm == "engine" and shape.block is None:
            rows = chains.engine_rows(Plan.full(shape.sites))
            row["rows"], row["bytes"] = rows, rows * shape.tokens * shape.width * chain.x.element_size()
            row["bandwidth_share"] = row["bytes"] / (row["graph_ms"]["median"] / 1e3) / bandwidth


def measure(case: Case, bandwidth: float) -> dict[str, Any]:
    """One row of the table, of an arm that can run the shape."""
    return Checked(case).measure(bandwidth)


def ready(case: Case) -> tuple[Checked, None]:
    """A case for a process of its own, which gives back what the check took of the device's memory."""
    checked = Checked(case)
    torch.cuda.empty_cache()
    return checked, None


def measure_peer(case: Case, bandwidth: float, limit: float) -> dict[str, Any]:
    """One row of the table, of another package's operator; the reason where it cannot run the shape in `limit` seconds.

    In a process of its own: a package may tune for an hour, or fault on the device.
    """
    row = {**case.head, "version": peers.version(case.arm)}
    why = peers.obstacle(case.arm, case.shape, case.dtype)
    if why:
        return {**row, "cannot_run": why}
    try:
        return {**row, **run_apart(limit, measure, case, bandwidth)}
    except (RuntimeError, TimeoutError) as error:
        return {**row, "cannot_run": str(error)}


def _map_step(chain: Chain, join: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
    out = chains.with_map_alone(chain, join)
    return torch.autograd.grad(out, [chain.x], chain.upstream)


def table(rows: list[dict[str, Any]]) -> str:
    """The results in a few lines."""
    wide = max((len(row["arm"]) for row in rows), default=0)
    lines = [f"{'shape':9s} {'arm':{wide}s} {'graph ms (least-most)':>22s} {'eager ms':>9s} {'copy bw':>7s} "
             f"{'MiB':>7s} {'error/ref':>9s} {'first s':>7s}"]  # fmt: skip
    for row in rows:
        head = f"{row['shape']:9s} {row['arm']:{wide}s} "
        if why := reason(row):
            errors = (
                f"; error/ref {row['check']['ratio']:.2f}, {_largest(row['check']['errors'])}" if "check" in row else ""
            )
            lines.append(head + why + errors)
            continue
        checked = row["check"]
        tail = f"{checked['ratio']:9.2f} {checked['first_call_s']:7.1f}"
        graph = row["graph_ms"]
        span = f"{graph['median']:.3f} ({graph['least']:.3f}-{graph['most']:.3f})"
        share = f"{row['bandwidth_share']:7.0%}" if "bandwidth_share" in row else " " * 7
        memory = row["peak_memory"] / 2**20
        lines.append(head + f"{span:>22s} {row['eager_ms']['median']:9.2f} {share} {memory:7.0f} {tail}")
    return "\n".join(lines)


def reason(row: dict[str, Any]) -> str | None:
    """Why a row has no numbers; None where it has."""
    if "skipped" in row:
        return row["skipped"]
    if "cannot_run" in row:
        return f"cannot run: {row['cannot_run']}"
    if row["check"]["green"]:
        return None
    return f"no numbers: {'errors too large' if row['check']['equal_runs'] else 'two runs differ'}"


def _largest(errors: dict[str, dict[str, float]]) -> str:
    return ", ".join(f"{name} {pair['ours']:.1e}/{pair['reference']:.1e}" for name, pair in errors.items())


def run(
    out: Path,
    shapes: list[str],
    arms: list[str],
    dtype: str,
    budget: float,
    peer_limit: float,
    processes: bool = False,
    device: str = "cuda",
) -> list[dict[str, Any]]:
    """Measure every arm on every shape, arm by arm; an arm past the budget is left out. Times in seconds.

    processes: each in a process of its own, which compile at the same time; only one measures at a time.
    Writes route.json row by row, and the figure route.svg and route.png at the end.
    """
    timing.require_cuda()
    cases = [Case(name, chains.SHAPES[name], DTYPES[dtype], arm, device) for arm in arms for name in shapes]
    apart = [case for case in cases if processes and case.arm not in peers.PEERS and not obstacle(case.arm, case.shape)]
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        # An empty cache, so that the time to the first call is that of a fresh machine.
        _use_cache(stack.enter_context(tempfile.TemporaryDirectory()))
        bandwidth = timing.copy_bandwidth()
        torch.cuda.empty_cache()
        together = stack.enter_context(Together(ready, apart))
        begun = time.perf_counter()
        for case in cases:
            why = obstacle(case.arm, case.shape)
            if why is None and time.perf_counter() - begun > budget:
                why = f"not measured: over {budget:.0f} s"
            if why:
                rows.append({**case.head, "skipped": why})
            elif case.arm in peers.PEERS:
                rows.append(measure_peer(case, bandwidth, peer_limit))
            elif case in apart:
                rows.append(together.ask(apart.index(case), "measure", bandwidth))
            else:
                rows.append(measure(case, bandwidth))
            _write(out, dtype, bandwidth, rows)
    result = _write(out, dtype, bandwidth, rows)
    print(f"{timing.environment()['device']}, {dtype}, copy {bandwidth / 1e12:.2f} TB/s")
    print(table(rows))
    print(draw(result, out))
    return rows


def draw(result: dict[str, Any], out: Path) -> str:
    """Write the figure of a result beside it; the paths, or why there are none."""
    try:
        from depthroute.bench import route_figure
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "depthroute":
            raise
        return f"no figure: it needs {package}, pip install 'depthroute[report]'"
    return "figure: " + ", ".join(map(str, route_figure.write(result, out)))


def named_arms(names: Sequence[str]) -> list[str]:
    """Arms by name, "peers" for all of them. Peers come last, since they may use up the budget."""
    named = [one for name in names for one in (peers.PEERS if name == "peers" else [name])]
    return sorted(dict.fromkeys(named), key=lambda arm: arm in peers.PEERS)


def _use_cache(folder: str) -> None:
    os.environ["TRITON_CACHE_DIR"] = folder


def _write(out: Path, dtype: str, bandwidth: float, rows: list[dict[str, Any]]) -> dict[str, Any]:
    out.mkdir(parents=True, exist_ok=True)
    result = {"environment": timing.environment(), "dtype": dtype, "copy_bandwidth": bandwidth, "rows": rows}
    (out / "route.json").write_text(json.dumps(result, indent=1))
    return result


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="depthroute bench route", description="Measure all depth reads.")
    parser.add_argument("--out", type=Path, required=True, help="folder for route.json and its figure, or sweep.json")
    parser.add_argument("--shapes", nargs="+", choices=list(chains.SHAPES), default=["100m", "350m", "1b"])
    parser.add_argument(
        "--arms",
        nargs="+",
        choices=[*ARMS, *peers.PEERS, "peers"],
        default=list(ARMS),
        help="peers: all of the other packages, which run where the shape has H = 1 and they are installed",
    )
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--budget", type=positive, default=90.0, help="seconds after which no more arms are begun")
    parser.add_argument(
        "--peer-limit", type=positive, default=120.0, help="seconds for one peer at one shape, tuning too"
    )
    parser.add_argument("--processes", action="store_true", help="each in a process of its own: they compile at once")
    parser.add_argument("--sweep", action="store_true", help="try settings of the kernels instead, and print the best")
    parser.add_argument("--phases", nargs="+", default=list(PHASES), choices=PHASES, help="what a sweep tries")
    options = parser.parse_args(arguments)
    options.out = new_folder(options.out, "--out")
    if options.sweep:
        if any(chains.SHAPES[name].block for name in options.shapes):
            parser.error("--sweep has no gated reads")
        from depthroute.bench.sweep import sweep

        sweep(options.out, options.shapes, options.phases, DTYPES[options.dtype], options.budget)
    else:
        arms = named_arms(options.arms)
        limits = options.budget, options.peer_limit
        run(options.out, options.shapes, arms, options.dtype, *limits, processes=options.processes)


if __name__ == "__main__":
    in_one_line(main)
