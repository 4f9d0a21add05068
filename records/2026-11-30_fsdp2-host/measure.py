"""What a step of 1b by FSDP2 waits for: python measure.py OUT SCHEME on two GPUs, in each of two processes of torchrun.

    torchrun --nproc-per-node 2 records/2026-11-30_fsdp2-host/measure.py OUT.json mhar

Rounds of steps of one GPU and of two, with the collections of Python's garbage in them, as they are, with four times as
many programs in backward kernels, and with a frozen heap; then two steps under the profiler: how long the GPU was busy
with anything but NCCL, and its gaps.
"""

from __future__ import annotations

import gc
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from depthroute.bench import scale
from depthroute.ops.kernels import settings
from depthroute.training.garbage import freeze_heap
from depthroute.training.optim import build_optimizer
from depthroute.training.recipe import OptimizerRecipe
from depthroute.training.sharding import shard

ROUNDS, STEPS = 4, 3
MORE = {"merge_backward_programs": 4 * 528, "inter_backward_programs": 4 * 264}
collections: list[tuple[int, float]] = []  # generation and seconds
_began = [0.0]


def heard(phase: str, info: dict[str, int]) -> None:
    if phase == "start":
        _began[0] = time.perf_counter()
    else:
        collections.append((info["generation"], time.perf_counter() - _began[0]))


def rounds(bench: scale.Bench, ids: torch.Tensor, name: str) -> None:
    for _ in range(2):
        bench.step(bench.model, [ids])
    collections.clear()
    samples, host = [], []
    for _ in range(ROUNDS):
        bench.wait()
        start = time.perf_counter()
        for _ in range(STEPS):
            bench.step(bench.model, [ids])
        host.append(round(1e3 * (time.perf_counter() - start) / STEPS))
        bench.wait()
        samples.append(round(1e3 * (time.perf_counter() - start) / STEPS))
    told = {g: (sum(1 for at, _ in collections if at == g), round(1e3 * sum(s for at, s in collections if at == g)))
            for g in range(3)}  # fmt: skip
    print(f"rank {bench.rank} {name}: ms {samples} host {host} collections (number, ms) {told}", flush=True)


def profile(bench: scale.Bench, ids: torch.Tensor) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(2):
            bench.step(bench.model, [ids])
        torch.cuda.synchronize()
    kernels: list[Any] = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((e.time_range.start, e.time_range.end) for e in kernels if "nccl" not in e.name.lower())
    begin, end, busy, waits = spans[0][0], spans[0][0], 0.0, 0.0
    for start, stop in spans:
        if start - end > 20:
            waits += start - end
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    shown = (value / 2e3 for value in (end - begin, busy, waits))
    print(f"rank {bench.rank} a step: {next(shown):.0f} ms, busy {next(shown):.0f}, gaps {next(shown):.0f}", flush=True)


def phase(bench: scale.Bench, ids: torch.Tensor, name: str) -> None:
    bench.optimizer = build_optimizer(bench.model, OptimizerRecipe(learning_rate=1e-4))
    rounds(bench, ids, f"{name}, as it is")
    if name == "two":
        with settings.overriding(**MORE):
            rounds(bench, ids, f"{name}, more programs")
    freeze_heap()
    rounds(bench, ids, f"{name}, frozen")
    if torch.cuda.is_available():
        profile(bench, ids)
    gc.unfreeze()
    bench.optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    out, scheme, *others = sys.argv[1:]
    given = ["--preset", "1b", "--strategy", "fsdp2", "--keep-gathered", "--batch", "16", "--length", "1024"]
    bench = scale.Bench(scale.parse(["--out", out, "--scheme", scheme, *given, *others]))
    bench.prepare()
    gc.callbacks.append(heard)
    ids = bench.batch(0, bench.rank)
    if bench.rank == 0:
        phase(bench, ids, "one")
    dist.barrier()
    bench.model.zero_grad(set_to_none=True)
    shard(bench.model, reshard=False)
    phase(bench, ids, "two")
    dist.destroy_process_group()
