"""Kernels of one arm's training steps: python profile_steps.py OUT PRESET SCHEME full|parts|graphs

full: the whole model is compiled; parts: as several devices need it; graphs: the whole, replayed as CUDA graphs.
"""

import sys
import time
from pathlib import Path

import torch

from depthroute.bench.arm import Arm, Job
from depthroute.bench.train import MICROBATCH
from depthroute.training.compilation import compile_parts

STEPS = 3  # under the profiler


def main(out: str, preset: str, scheme: str, mode: str) -> None:
    batch, length = MICROBATCH[preset]
    arm = Arm(Job(preset, scheme, "bf16", batch, length, compiled=mode != "parts", graphs=mode == "graphs"))
    if mode == "parts":
        compile_parts(arm.model)
    start = time.perf_counter()
    arm.turn(1)
    first = time.perf_counter() - start
    arm.turn(3)
    walls, hosts = [], []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(4):
            arm.step()
        hosts.append((time.perf_counter() - start) / 4)
        torch.cuda.synchronize()
        walls.append((time.perf_counter() - start) / 4)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            arm.step()
        torch.cuda.synchronize()
    events = [
        event for event in profiler.key_averages() if event.self_device_time_total and not event.is_user_annotation
    ]
    rows = sorted(
        ((e.self_device_time_total / 1e3 / STEPS, e.count / STEPS, e.key[:110]) for e in events), reverse=True
    )
    wall = sorted(walls)[2] * 1e3
    name = f"{preset}-{scheme}-{mode}-bf16"
    memory = torch.cuda.max_memory_allocated() / 2**30
    head = (
        f"{name}: wall {wall:.2f} ms, host {sorted(hosts)[2] * 1e3:.2f}, busy {sum(row[0] for row in rows):.2f} ms, "
        f"{sum(row[1] for row in rows):.0f} kernels, {batch * length / wall * 1e3:,.0f} tok/s, peak {memory:.2f} GiB, "
        f"first {first:.0f} s"
    )
    lines = [f"{row[0]:9.3f} ms {row[1]:7.1f} x  {row[2]}" for row in rows]
    (Path(out) / f"{name}.txt").write_text("\n".join([head, *lines]) + "\n")
    print(head)


if __name__ == "__main__":
    main(*sys.argv[1:])
