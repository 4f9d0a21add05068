"""Whole training steps: forward, backward, clip, AdamW. Schemes side by side in one process, their steps interleaved.

    python -m depthroute.bench.train --out DIR --preset 100m [--batch 8] [--length 2048] [--schemes additive mhar]
        [--precision bf16 autocast] [--eager | --graphs] [--microbatches 1] [--overrides num_hidden_layers=4]

`bf16` holds weights, gradients and optimizer state in bf16; `autocast` holds them in fp32 and computes in bf16. The
table gives tokens a second beside the first scheme's, the milliseconds of a step and for how many of them the GPU was
busy, peak memory, and the seconds from a built model to the end of its first step. Where a step takes much longer than
the GPU is busy, it waits for launches from Python; `--graphs` replays them as CUDA graphs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthroute.bench import timing

# Sequences and length of the paper's microbatch on one GPU.
MICROBATCH = {"tiny": (2, 256), "100m": (8, 2048), "124m": (8, 2048), "350m": (4, 1024), "1b": (2, 1024)}
PRECISIONS = ("bf16", "autocast")
MAX_GRAD_NORM = 1.0
PROFILED = 2  # steps


def parse_scheme(text: str) -> dict[str, Any]:
    """`mhar` or `mhar:num_heads=1,scale=0.5` as the `residual` entry of a configuration."""
    name, _, options = text.partition(":")
    pairs = (option.split("=", 1) for option in options.split(",") if option)
    return {"scheme": name, **{key: _value(value) for key, value in pairs}}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


class Arm:
    """One scheme: its model, its optimizer, and what its steps took."""

    def __init__(
        self, scheme: str, decoder: Any, precision: str, *, compiled: bool, device: str, graphs: bool = False
    ) -> None:
        import depthroute
        from depthroute.training.cuda_graphs import MODE

        self.scheme, self.precision, self.graphs, self.device = scheme, precision, graphs, device
        self.samples: list[float] = []
        self.losses: list[float] = []
        torch.manual_seed(0)
        config = depthroute.DepthRoutedConfig(decoder=decoder, residual=parse_scheme(scheme))
        model: Any = depthroute.DepthRoutedForCausalLM(config)
        self.model: torch.nn.Module = model.to(device, torch.bfloat16 if precision == "bf16" else torch.float32).train()
        self.forward: Callable[..., Any] = self.model
        if compiled:
            self.forward = torch.compile(self.model, fullgraph=True, mode=MODE if graphs else None)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=device == "cuda"
        )

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def step(self, batches: list[Tensor]) -> Tensor:
        """One optimizer step over some microbatches; the mean loss, not waited for."""
        from depthroute.training.cuda_graphs import own_gradients

        total = torch.zeros((), device=self.device)
        for number, ids in enumerate(batches):
            with torch.autocast(self.device, torch.bfloat16, enabled=self.precision == "autocast"):
                loss = self.forward(input_ids=ids, labels=ids, use_cache=False).loss / len(batches)
            loss.backward()
            total += loss.detach()
            if self.graphs and number == 0 and len(batches) > 1:
                own_gradients(self.model)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total


def measure(
    preset: str,
    schemes: list[str],
    precision: str,
    *,
    batch: int,
    length: int,
    microbatches: int,
    rounds: int,
    steps: int,
    compiled: bool,
    overrides: dict[str, Any],
    graphs: bool = False,
    device: str = "cuda",
) -> list[dict[str, Any]]:
    """One row for each scheme; the schemes take turns of `steps` steps, `rounds` times.

    graphs: replay what is compiled as CUDA graphs.
    """
    from depthroute.models import presets

    decoder = presets.decoder_config(preset, **overrides)
    generator = torch.Generator().manual_seed(0)
    batches = [
        torch.randint(decoder.vocab_size, (batch, length), generator=generator).to(device) for _ in range(microbatches)
    ]
    arms: list[Arm] = []
    rows: list[dict[str, Any]] = []
    for scheme in schemes:
        _forget_memory(device)
        before = _allocated(device)
        arm = Arm(scheme, decoder, precision, compiled=compiled, graphs=graphs, device=device)
        start = time.perf_counter()
        loss = float(arm.step(batches))
        first = time.perf_counter() - start
        for _ in range(2):  # the state of the optimizer is there from the second on, and every graph after the third
            arm.step(batches)
        rows.append(
            {
                "preset": preset,
                "scheme": scheme,
                "precision": precision,
                "compiled": compiled,
                "graphs": graphs,
                "batch": batch,
                "length": length,
                "microbatches": microbatches,
                "parameters": arm.parameters,
                "first_step_s": first,
                "first_loss": loss,
                "peak_memory": _peak(device) - before,
            }
        )
        arms.append(arm)
    for _ in range(rounds):
        for arm in arms:
            _synchronize(device)
            start = time.perf_counter()
            for _ in range(steps):
                arm.step(batches)
            _synchronize(device)
            arm.samples.append((time.perf_counter() - start) / steps)
    tokens = batch * length * microbatches
    for arm, row in zip(arms, rows, strict=True):
        speeds = [tokens / seconds for seconds in arm.samples]
        row["tokens_per_second"] = {"median": statistics.median(speeds), "least": min(speeds), "most": max(speeds)}
        # Taken turn by turn, so that what the whole card does slower or faster does not count.
        row["of_first"] = statistics.median(a / b for a, b in zip(arms[0].samples, arm.samples, strict=True))
        row["step_ms"] = statistics.median(arm.samples) * 1e3
        row["busy_ms"] = _busy(arm, batches) if device == "cuda" else None
        row["memory_of_first"] = row["peak_memory"] / max(1, rows[0]["peak_memory"])
    return rows


def _busy(arm: Arm, batches: list[Tensor]) -> float:
    """Milliseconds a step of kernels and copies on the GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED):
            arm.step(batches)
        torch.cuda.synchronize()
    events = [event for event in profiler.key_averages() if not event.is_user_annotation]  # spans of what is counted
    return sum(event.self_device_time_total for event in events) / 1e3 / PROFILED


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _forget_memory(device: str) -> None:
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def _peak(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


def table(rows: list[dict[str, Any]]) -> str:
    """The results in a few lines."""
    names = f"{'preset':6s} {'scheme':22s} {'precision':9s}"
    speeds = f"{'tokens/s (least-most)':>27s} {'x first':>7s} {'step ms':>8s} {'busy ms':>8s}"
    lines = [f"{names} {speeds} {'GiB':>6s} {'x first':>7s} {'first s':>7s}"]
    for row in rows:
        speed = row["tokens_per_second"]
        span = f"{speed['median']:,.0f} ({speed['least']:,.0f}-{speed['most']:,.0f})"
        busy = "-" if row["busy_ms"] is None else f"{row['busy_ms']:.2f}"
        lines.append(
            f"{row['preset']:6s} {row['scheme']:22s} {row['precision']:9s} {span:>27s} {row['of_first']:7.3f} "
            f"{row['step_ms']:8.2f} {busy:>8s} "
            f"{row['peak_memory'] / 2**30:6.2f} {row['memory_of_first']:7.3f} {row['first_step_s']:7.1f}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="depthroute bench train", description="Measure whole training steps.")
    parser.add_argument("--out", type=Path, required=True, help="folder for train.json")
    parser.add_argument("--preset", choices=list(MICROBATCH), default="100m")
    parser.add_argument("--schemes", nargs="+", default=["additive", "mhar"], help="mhar, mhar:num_heads=1, ...")
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=["bf16"])
    parser.add_argument("--batch", type=int, help="sequences of a microbatch")
    parser.add_argument("--length", type=int, help="tokens of a sequence")
    parser.add_argument("--microbatches", type=int, default=1, help="for each optimizer step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="of each scheme in a round")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--eager", action="store_true", help="without torch.compile")
    how.add_argument("--graphs", action="store_true", help="replay what is compiled as CUDA graphs")
    parser.add_argument(
        "--overrides", nargs="*", default=[], metavar="FIELD=VALUE", help="of the decoder configuration"
    )
    options = parser.parse_args(arguments)
    timing.require_cuda()
    batch, length = MICROBATCH[options.preset]
    rows: list[dict[str, Any]] = []
    for precision in options.precision:
        rows += measure(
            options.preset,
            options.schemes,
            precision,
            batch=options.batch or batch,
            length=options.length or length,
            microbatches=options.microbatches,
            rounds=options.rounds,
            steps=options.steps,
            compiled=not options.eager,
            graphs=options.graphs,
            overrides={key: _value(value) for key, value in (each.split("=", 1) for each in options.overrides)},
        )
        torch._dynamo.reset()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "train.json").write_text(json.dumps({"environment": timing.environment(), "rows": rows}, indent=1))
    how_run = "eager" if options.eager else "compiled, CUDA graphs" if options.graphs else "compiled"
    print(f"{timing.environment()['device']}, {how_run}")
    print(table(rows))


if __name__ == "__main__":
    main()
