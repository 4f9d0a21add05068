"""Training steps on one GPU and on all of them: tokens a second, memory, and whether the losses are the same.

    torchrun --nproc-per-node 2 -m depthroute.bench.scale --out FILE.json --preset 350m --scheme mhar --strategy ddp

First one rank trains alone while the others wait, then all of them together from the same weights: `ddp` with copies,
`fsdp2` with shards. Both train on the same batches of --loss-steps steps (one GPU accumulates what the others would
have done), and then with one microbatch for each GPU against the clock. The scaling efficiency is the speed of all
divided by the number of GPUs times the speed of one. Both have the weights in fp32 under bf16 autocast and are compiled
as `depthroute train` does it on several GPUs, as a whole for `ddp` and in parts for `fsdp2`. `host_s` is how long the
first rank's host took to hand out a step: where it is as long as the step, the GPU waits for it. A rank also waits for
the others, so `host_s_by_rank` has them all. A round begins with nothing handed out ahead, so one of very few steps is
slower than training is.

A model that one GPU cannot hold (--sharded) is made in shards, and only the second part is run.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import depthroute
from depthroute.bench.ahead import compile_ahead, compile_whole_ahead
from depthroute.bench.arm import MAX_GRAD_NORM, parse_scheme
from depthroute.bench.options import count, count_or_none, field, positive
from depthroute.bench.train import MICROBATCH
from depthroute.files import new_file, write_json
from depthroute.models.presets import decoder_config
from depthroute.training.garbage import freeze_heap
from depthroute.training.objective import return_objective
from depthroute.training.optim import build_optimizer
from depthroute.training.recipe import OptimizerRecipe
from depthroute.training.sharding import clip_grad_norm_, initialize, shard

# Llama-3.1-8B's shape in a Qwen3 decoder: 8.03 B parameters, on top of any preset.
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 14336,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
}


# Options that a result tells of.
KEPT = ("preset", "scheme", "strategy", "batch", "length", "checkpointing", "keep_gathered", "steps")


class Bench:
    """One model on this rank's device, its optimizer, and what was measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rank, self.ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        local = int(os.environ.get("LOCAL_RANK", "0"))
        self.device = torch.device("cuda", local) if options.device == "cuda" else torch.device("cpu")
        if options.device == "cuda":
            torch.cuda.set_device(self.device)
        started = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
        if not started:
            os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")
        dist.init_process_group(
            "nccl" if options.device == "cuda" else "gloo",
            device_id=self.device if options.device == "cuda" else None,
        )
        preset = options.preset if options.preset in MICROBATCH else "1b"
        self.decoder = decoder_config(preset, **{**SHAPES.get(options.preset, {}), **options.overrides})
        self.residual = parse_scheme(options.scheme)
        self.result: dict[str, Any] = {
            **{key: getattr(options, key) for key in KEPT},
            "compiled": not options.eager,
            "ranks": self.ranks,
            "overrides": options.overrides,
        }

    def prepare(self) -> None:
        """Build the model and compile what a step of it needs."""
        began = time.perf_counter()
        torch.manual_seed(0)
        with torch.device("meta" if self.options.sharded else self.device):
            config = depthroute.DepthRoutedConfig(decoder=self.decoder, residual=self.residual)
            self.model: Any = depthroute.DepthRoutedForCausalLM(config)
        self.model.train()
        return_objective(self.model, 0.0)
        self.result["parameters"] = sum(parameter.numel() for parameter in self.model.parameters())
        self.result["build_s"] = time.perf_counter() - began
        if not self.options.eager:
            began = time.perf_counter()
            ids = self.batch(0, 0)
            ahead = compile_whole_ahead if self.options.strategy == "ddp" else compile_ahead
            ahead(self.model, ids, self.options.precision, backend=self.options.backend, fullgraph=True)
            self.result["compile_s"] = time.perf_counter() - began
            self.result["graphs_ahead"] = graphs()
        if self.options.checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.forget_memory()
        dist.barrier()

    def run(self) -> None:
        """Measure one rank alone and then all ranks; each result is written at once."""
        if not self.options.sharded:
            fresh = {name: value.cpu().clone() for name, value in self.model.state_dict().items()}
            if self.rank == 0:
                self.result["one"] = self.train(ranks=1)
                self.save()
            dist.barrier()
            self.model.zero_grad(set_to_none=True)
            self.model.load_state_dict(fresh)
            del fresh
        if self.ranks > 1 or self.options.sharded:
            self.result["bus_gb_per_s"] = self.bus_bandwidth()
            found = self.train(ranks=self.ranks)
            gathered: list[Any] = [None] * self.ranks
            dist.all_gather_object(gathered, {key: found[key] for key in ("peak_memory", "host_s")})
            peaks, hosts = ([rank[key] for rank in gathered] for key in ("peak_memory", "host_s"))
            self.result["all"] = {**found, "peak_memory": peaks, "host_s_by_rank": hosts}
            if "one" in self.result:
                one, every = self.result["one"], self.result["all"]
                self.result["efficiency"] = every["tokens_per_second"] / (self.ranks * one["tokens_per_second"])
                self.result["largest_loss_difference"] = max(
                    abs(a - b) for a, b in zip(one["losses"], every["losses"], strict=True)
                )
            self.save()

    def train(self, ranks: int) -> dict[str, Any]:
        """Steps of this rank alone (`ranks` = 1) or of all ranks together: their losses, then their speed."""
        self.forget_memory()
        together = ranks > 1 or self.options.sharded
        forward: Any = self.model
        if together and self.options.strategy == "ddp":
            forward = DistributedDataParallel(
                self.model, device_ids=[self.device.index] if self.device.type == "cuda" else None
            )
        elif together:
            shard(self.model, reshard=not self.options.keep_gathered)
            if self.options.sharded:
                initialize(self.model, self.device)
        self.optimizer = build_optimizer(self.model, OptimizerRecipe(learning_rate=self.options.learning_rate))
        losses = []
        for step in range(self.options.loss_steps):
            shares = range(self.ranks) if ranks == 1 else [self.rank]
            loss = self.step(forward, [self.batch(step, share) for share in shares])
            if ranks > 1:
                dist.all_reduce(loss)
                loss /= ranks
            losses.append(loss.item())
        mine = self.batch(0, 0 if ranks == 1 else self.rank)
        for _ in range(self.options.warm_up):
            self.step(forward, [mine])
        freeze_heap()  # as `depthroute train` does
        samples, host = [], []
        for _ in range(self.options.rounds):
            self.wait()
            start = time.perf_counter()
            for _ in range(self.options.steps):
                self.step(forward, [mine])
            host.append((time.perf_counter() - start) / self.options.steps)
            self.wait()
            samples.append((time.perf_counter() - start) / self.options.steps)
        gc.unfreeze()
        tokens = ranks * self.options.batch * self.options.length
        found = {
            "ranks": ranks,
            "graphs": graphs(),
            "losses": losses,
            "step_s": samples,
            "host_s": host,
            "tokens_per_second": tokens / statistics.median(samples),
            "peak_memory": self.peak_memory(),
        }
        self.optimizer.zero_grad(set_to_none=True)
        del self.optimizer
        return found

    def step(self, forward: Any, batches: list[Tensor]) -> Tensor:
        """One step of the optimizer over this rank's microbatches; their mean loss, not waited for."""
        total = torch.zeros((), device=self.device)
        for ids in batches:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.precision == "bf16"):
                loss = forward(input_ids=ids, labels=ids, use_cache=False).loss / len(batches)
            loss.backward()
            total += loss.detach()
        clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total

    def batch(self, step: int, share: int) -> Tensor:
        """The microbatch (B, T) of one rank at a step. Words have the frequencies of Zipf, which can be learned."""
        generator = torch.Generator().manual_seed(1 + step * self.ranks + share)
        uniform = torch.rand((self.options.batch, self.options.length), generator=generator, dtype=torch.float64)
        ids = (self.decoder.vocab_size**uniform).long() - 1
        return ids.clamp_(0, self.decoder.vocab_size - 1).to(self.device)

    def bus_bandwidth(self, num_bytes: int = 2**30) -> float | None:
        """What an all-reduce moves through the link of each GPU, in GB/s each way."""
        if self.device.type != "cuda" or self.ranks == 1:
            return None
        buffer = torch.zeros(num_bytes // 4, device=self.device)
        for _ in range(2):
            dist.all_reduce(buffer)
        self.wait()
        start = time.perf_counter()
        for _ in range(5):
            dist.all_reduce(buffer)
        self.wait()
        return 5 * num_bytes * 2 * (self.ranks - 1) / self.ranks / (time.perf_counter() - start) / 1e9

    def save(self) -> None:
        if self.rank == 0:
            write_json(self.options.out, self.result)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def forget_memory(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_memory(self) -> int:
        return torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0


def graphs() -> int:
    """How many graphs the compiler has made in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def table(results: dict[str, dict[str, Any]]) -> str:
    """Results by name in a few lines; `host` is the part of a step in which the host hands it out."""
    lines = [
        f"{'part':16s} {'tokens/s 1':>11s} {'host':>5s} {'tokens/s all':>12s} {'host':>5s} {'effic.':>7s} "
        f"{'GiB 1':>6s} {'GiB all':>13s} {'loss diff':>9s} {'compile s':>9s}"
    ]
    for name, result in results.items():
        one, every = result.get("one", {}), result.get("all", {})
        memory = "/".join(f"{peak / 2**30:.1f}" for peak in every.get("peak_memory", []))
        lines.append(
            f"{name:16s} {_shown(one.get('tokens_per_second'), ',.0f'):>11s} {_shown(_host_part(one), '.2f'):>5s} "
            f"{_shown(every.get('tokens_per_second'), ',.0f'):>12s} {_shown(_host_part(every), '.2f'):>5s} "
            f"{_shown(result.get('efficiency'), '.3f'):>7s} "
            f"{_shown(one.get('peak_memory', 0) / 2**30 or None, '.1f'):>6s} {memory or '-':>13s} "
            f"{_shown(result.get('largest_loss_difference'), '.1e'):>9s} {_shown(result.get('compile_s'), '.0f'):>9s}"
            + (f"  {result['error']}" if "error" in result else "")
        )
    return "\n".join(lines)


def _host_part(found: dict[str, Any]) -> float | None:
    return statistics.median(found["host_s"]) / statistics.median(found["step_s"]) if "host_s" in found else None


def _shown(value: float | None, how: str) -> str:
    return "-" if value is None else format(value, how)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="depthroute bench scale", description="Measure training on several GPUs.")
    parser.add_argument("--out", type=Path, required=True, help="file for the result")
    parser.add_argument("--preset", choices=[*MICROBATCH, *SHAPES], default="350m")
    parser.add_argument("--scheme", default="mhar", help="mhar, mhar:num_heads=1, ...")
    parser.add_argument("--strategy", choices=["ddp", "fsdp2"], default="ddp")
    parser.add_argument("--batch", type=count, default=4, help="sequences of a microbatch on one GPU")
    parser.add_argument("--length", type=count, default=1024, help="tokens of a sequence")
    parser.add_argument(
        "--precision", choices=["bf16", "fp32"], default="bf16", help="bf16: autocast over fp32 weights"
    )
    parser.add_argument("--checkpointing", action="store_true", help="recompute the activations of a layer")
    parser.add_argument("--sharded", action="store_true", help="never hold the whole model on one GPU")
    parser.add_argument("--keep-gathered", action="store_true", help="gather a layer once a step, not twice")
    parser.add_argument("--learning-rate", type=positive, default=1e-4)
    parser.add_argument("--loss-steps", type=count, default=10)
    parser.add_argument("--warm-up", type=count_or_none, default=3)
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--steps", type=count, default=8, help="of a round, whose time is one sample")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--overrides", nargs="*", type=field, default=[], metavar="FIELD=VALUE", help="of the decoder")
    parser.add_argument("--hold", type=Path, help="say HOLD.ready once compiled, and measure when HOLD.go is there")
    options = parser.parse_args(arguments)
    options.overrides = dict(options.overrides)
    options.out = new_file(options.out, "--out")
    if options.sharded and options.strategy != "fsdp2":
        parser.error("--sharded needs --strategy fsdp2")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    bench = Bench(options)
    try:
        bench.prepare()
        bench.save()
        if options.hold is not None:
            if bench.rank == 0:
                options.hold.with_suffix(".ready").touch()
            while not options.hold.with_suffix(".go").exists():
                time.sleep(0.05)
        bench.run()
        if bench.rank == 0:
            print(table({f"{options.preset} {options.scheme}": bench.result}))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
