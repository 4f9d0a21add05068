"""One scheme's model and optimizer as `bench train` measures them: its first steps, turns of steps, the busy time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

MAX_GRAD_NORM = 1.0
PROFILED = 2  # steps


@dataclass(frozen=True)
class Job:
    """What one arm is: a shape, a scheme, how it computes, and the microbatches of an optimizer step.

    precision: "bf16" (weights, gradients and optimizer state too) or "autocast" (those in fp32). graphs: replay what is
    compiled as CUDA graphs. overrides: fields of the decoder configuration.
    """

    preset: str
    scheme: str
    precision: str
    batch: int
    length: int
    microbatches: int = 1
    compiled: bool = True
    graphs: bool = False
    overrides: dict[str, Any] = field(default_factory=dict)
    device: str = "cuda"

    @property
    def tokens(self) -> int:
        return self.batch * self.length * self.microbatches


def parse_scheme(text: str) -> dict[str, Any]:
    """`mhar` or `mhar:num_heads=1,scale=0.5` as the `residual` entry of a configuration."""
    name, _, options = text.partition(":")
    residual: dict[str, Any] = {"scheme": name}
    for option in filter(None, options.split(",")):
        key, equals, value = option.partition("=")
        if not equals:
            raise ValueError(f"scheme {text!r}: got the option {option!r}, wants NAME=VALUE")
        residual[key] = parse_value(value)
    return residual


def parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


class Arm:
    """One scheme: its model, its optimizer and its data, the same for every scheme of a shape."""

    def __init__(self, job: Job) -> None:
        import depthroute
        from depthroute.models import presets
        from depthroute.training.cuda_graphs import MODE

        self.job = job
        decoder = presets.decoder_config(job.preset, **job.overrides)
        generator = torch.Generator().manual_seed(0)
        self.batches: list[Tensor] = [
            torch.randint(decoder.vocab_size, (job.batch, job.length), generator=generator).to(job.device)
            for _ in range(job.microbatches)
        ]
        torch.manual_seed(0)
        config = depthroute.DepthRoutedConfig(decoder=decoder, residual=parse_scheme(job.scheme))
        model: Any = depthroute.DepthRoutedForCausalLM(config)
        dtype = torch.bfloat16 if job.precision == "bf16" else torch.float32
        self.model: torch.nn.Module = model.to(job.device, dtype).train()
        self.forward: Callable[..., Any] = self.model
        if job.compiled:
            self.forward = torch.compile(self.model, fullgraph=True, mode=MODE if job.graphs else None)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=job.device == "cuda"
        )

    def step(self) -> Tensor:
        """One optimizer step over its microbatches; the mean loss, not waited for."""
        from depthroute.training.cuda_graphs import own_gradients

        job = self.job
        total = torch.zeros((), device=job.device)
        for number, ids in enumerate(self.batches):
            with torch.autocast(job.device, torch.bfloat16, enabled=job.precision == "autocast"):
                loss = self.forward(input_ids=ids, labels=ids, use_cache=False).loss / job.microbatches
            loss.backward()
            total += loss.detach()
            if job.graphs and number == 0 and job.microbatches > 1:
                own_gradients(self.model)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total

    def turn(self, steps: int) -> float:
        """Seconds a step, of some steps."""
        self._synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        self._synchronize()
        return (time.perf_counter() - start) / steps

    def busy(self) -> float | None:
        """Milliseconds a step of kernels and copies on the GPU; None on a CPU."""
        if self.job.device != "cuda":
            return None
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(PROFILED):
                self.step()
            torch.cuda.synchronize()
        events = [event for event in profiler.key_averages() if not event.is_user_annotation]  # spans of what counts
        return sum(event.self_device_time_total for event in events) / 1e3 / PROFILED

    def _synchronize(self) -> None:
        if self.job.device == "cuda":
            torch.cuda.synchronize()


def warmed_up(job: Job) -> tuple[Arm, dict[str, Any]]:
    """An arm after its first steps, and a row that tells of them: time to the first one, its loss, peak memory."""
    on_gpu = job.device == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    arm = Arm(job)
    start = time.perf_counter()
    loss = float(arm.step())
    first = time.perf_counter() - start
    for _ in range(2):  # the state of the optimizer is there from the second on, and every graph after the third
        arm.step()
    told = ("preset", "scheme", "precision", "compiled", "graphs", "batch", "length", "microbatches")
    return arm, {
        **{name: getattr(job, name) for name in told},
        "parameters": sum(parameter.numel() for parameter in arm.model.parameters()),
        "first_step_s": first,
        "first_loss": loss,
        "peak_memory": (torch.cuda.max_memory_allocated() if on_gpu else 0) - before,
    }
