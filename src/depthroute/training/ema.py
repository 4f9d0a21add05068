"""An exponential moving average of the weights, kept beside a model while it trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from depthroute.training.checkpoints import load_tensors, save_tensors
from depthroute.training.optim import clean_name
from depthroute.training.sharding import placed_like, reshard

FILE = "ema.safetensors"
SHARDED = "ema"


class WeightEma(TrainerCallback):
    """average <- decay * average + (1 - decay) * weights, in fp32, after every step of the optimizer.

    It starts as the weights from which the run starts. Every rank averages what it holds: the replicas of DDP stay
    equal, and under FSDP2 the average is sharded as the parameters are, in checkpoints too.
    """

    def __init__(self, decay: float) -> None:
        self._average = get_ema_multi_avg_fn(decay)
        self._model: Any = None
        self._averages: dict[str, Tensor] = {}

    def start(self, model: nn.Module) -> None:
        """Begin with the present weights of a model, which is wrapped and sharded already."""
        self._model = model
        self._averages = {name: value.detach().float().clone() for name, value in self._weights().items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take the present weights into the average."""
        weights = self._weights()
        self._average(list(self._averages.values()), [weights[name].float() for name in self._averages], 0)

    @contextmanager
    def in_the_model(self) -> Iterator[None]:
        """For a while the model has the average as its weights, and then the bits that it had before."""
        own = {name: value.clone() for name, value in self._weights().items()}
        self._write(self._averages)
        try:
            yield
        finally:
            self._write(own)

    def save(self, folder: Path, *, is_main: bool) -> None:
        """Write the average into a checkpoint: one file by the main rank, or shards by all. All ranks take part."""
        if any(isinstance(value, DTensor) for value in self._averages.values()):
            save_tensors(folder / SHARDED, self._averages)
        elif is_main:
            save_file({name: value.contiguous() for name, value in self._averages.items()}, folder / FILE)

    def load(self, folder: Path) -> None:
        """Go on with the average of a checkpoint."""
        if (folder / SHARDED).is_dir():
            load_tensors(folder / SHARDED, self._averages)
            return
        state = load_file(folder / FILE)
        for name, average in self._averages.items():
            average.copy_(placed_like(state[name], average))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **_: Any
    ) -> None:
        self.start(model)
        if state.global_step:
            self.load(Path(str(args.output_dir)) / f"checkpoint-{state.global_step}")

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.update()

    def _weights(self) -> dict[str, Tensor]:
        reshard(self._model)
        return {clean_name(name): parameter.detach() for name, parameter in self._model.named_parameters()}

    @torch.no_grad()
    def _write(self, values: dict[str, Tensor]) -> None:
        for name, weight in self._weights().items():
            weight.copy_(values[name])
