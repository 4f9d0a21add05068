"""The stock residual stream: every sublayer reads the running sum and adds to it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from depthroute.residual.base import Residual, State


class Additive(Residual):
    """The plain pre-norm Transformer, bit for bit the stock model. State: (stream,)."""

    @dataclass(frozen=True)
    class Options:
        pass

    identity_at_init = "exact"

    def start(self, x: Tensor) -> State:
        return (x,)

    def read(self, state: State, site: int, norm: nn.Module) -> tuple[Tensor, State]:
        return norm(state[0]), state

    def write(self, state: State, y: Tensor, site: int) -> State:
        return (state[0] + y,)

    def finish(self, state: State) -> Tensor:
        return state[0]
