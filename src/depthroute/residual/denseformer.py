"""DenseFormer: after every layer, a learned weighted average of the outputs of all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from depthroute.residual.base import Residual, State
from depthroute.residual.initialization import one_hot_
from depthroute.residual.options import check_count


class DepthWeightedAverage(nn.Module):
    """sum_j weight_j * output_j over the embedding and the layer outputs; starts as the newest alone."""

    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_outputs))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        one_hot_(self.weight, self.weight.numel() - 1)

    def forward(self, outputs: State) -> Tensor:
        weights = self.weight.to(outputs[0].dtype).unbind()
        return sum((w * x for w, x in zip(weights[1:], outputs[1:], strict=True)), start=weights[0] * outputs[0])


class DenseFormer(Residual):
    """Depth-weighted averages of layer outputs (arXiv 2402.02622, section 3).

    State: (stream, embedding, output of layer 0, output of layer 1, ...). Within a layer this is the plain stream.
    After every `period`-th layer i the stream becomes the average over the outputs j with i - j a multiple of
    `dilation`, the embedding counting as the output before layer 0.
    """

    @dataclass(frozen=True)
    class Options:
        period: int = 1
        dilation: int = 1

        def __post_init__(self) -> None:
            check_count("period", self.period)
            check_count("dilation", self.dilation)

    options: Options
    identity_at_init = "exact"

    def __init__(self, options: Options, decoder: Any) -> None:
        super().__init__(options, decoder)
        self.averages = nn.ModuleDict(
            {
                str(layer): DepthWeightedAverage(len(range(layer + 1, -1, -options.dilation)))
                for layer in range(options.period - 1, self.num_layers, options.period)
            }
        )

    @classmethod
    def check(cls, options: Options, decoder: Any) -> None:
        if options.period > decoder.num_hidden_layers:
            raise ValueError(
                f"residual.period is {options.period}, but must be at most the {decoder.num_hidden_layers} layers"
            )

    def start(self, x: Tensor) -> State:
        # The first output is a view: a node of its own, so that gradients sum in one order with and without
        # reentrant checkpointing, which takes stream and output as two inputs.
        return (x, x.view_as(x))

    def read(self, state: State, site: int, norm: nn.Module) -> tuple[Tensor, State]:
        return norm(state[0]), state

    def write(self, state: State, y: Tensor, site: int) -> State:
        stream = state[0] + y
        if site % 2 == 0:
            return (stream, *state[1:])
        outputs = (*state[1:], stream)
        layer = str(site // 2)
        if layer in self.averages:
            past = outputs[:: -self.options.dilation][::-1]
            return (self.averages[layer](past), *outputs)
        return (stream.view_as(stream), *outputs)

    def finish(self, state: State) -> Tensor:
        return state[0]
