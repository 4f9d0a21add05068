"""The host's part of a training step under FSDP2: python host.py SCHEME [PROFILE], on two CPU cores, without a GPU.

The 1b shape with layers of width 32 and 8 tokens, so that the work of the host is nearly all there is: 36 layers, two
gloo processes, parts compiled with aot_eager as `bench scale` does it. Prints the milliseconds of a step of one process
and of two, how many hooks a step registers on tensors, and, asked to, what takes the time.
"""

from __future__ import annotations

import cProfile
import multiprocessing
import os
import pstats
import statistics
import sys
import time

import torch
import torch.distributed as dist

from depthroute.bench import scale
from depthroute.training.optim import build_optimizer
from depthroute.training.recipe import OptimizerRecipe
from depthroute.training.sharding import shard

ARGUMENTS = (
    "--out /dev/null --preset 1b --strategy fsdp2 --keep-gathered --device cpu --backend aot_eager --batch 1 "
    "--length 8 --overrides vocab_size=64 num_hidden_layers=36 hidden_size=32 intermediate_size=48 head_dim=8 "
    "num_attention_heads=8 num_key_value_heads=8"
)
STEPS = 12


def step_ms(bench: scale.Bench, ids: torch.Tensor) -> float:
    """Median of some steps with a fresh optimizer."""
    bench.optimizer = build_optimizer(bench.model, OptimizerRecipe(learning_rate=1e-4))
    samples = []
    for _ in range(STEPS + 2):
        start = time.perf_counter()
        bench.step(bench.model, [ids])
        samples.append(1e3 * (time.perf_counter() - start))
    return statistics.median(samples[2:])


def hooks(bench: scale.Bench, ids: torch.Tensor) -> int:
    """Calls of `Tensor.register_hook` in a step."""
    counted, register = [], torch.Tensor.register_hook

    def count(tensor: torch.Tensor, hook: object) -> object:
        counted.append(hook)
        return register(tensor, hook)

    torch.Tensor.register_hook = count  # type: ignore[assignment,method-assign]
    bench.step(bench.model, [ids])
    torch.Tensor.register_hook = register  # type: ignore[method-assign]
    return len(counted)


def work(rank: int, scheme: str, profiled: bool) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29541", "WORLD_SIZE": "2"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    bench = scale.Bench(scale.parse([*ARGUMENTS.split(), "--scheme", scheme]))
    bench.prepare()
    ids = bench.batch(0, rank)
    alone = step_ms(bench, ids) if rank == 0 else 0.0
    dist.barrier()
    bench.model.zero_grad(set_to_none=True)
    shard(bench.model, reshard=False)
    together, registered = step_ms(bench, ids), hooks(bench, ids)
    if rank == 0:
        print(f"{scheme}: {alone:.0f} ms alone, {together:.0f} ms in shards of two, {registered} hooks", flush=True)
    profile = cProfile.Profile()
    if profiled and rank == 0:
        profile.enable()
    bench.step(bench.model, [ids])
    if profiled and rank == 0:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(20)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    scheme = sys.argv[1]
    started = [
        multiprocessing.get_context("spawn").Process(target=work, args=(rank, scheme, len(sys.argv) > 2))
        for rank in range(2)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join()
    sys.exit(any(process.exitcode for process in started))
