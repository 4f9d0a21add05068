"""The one interface between a decoder and its residual scheme."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from depthroute.residual.read import DepthRead

State = tuple[Tensor, ...]


class Residual(nn.Module):
    """How the sublayers of one decoder read from, and write to, what came before them.

    Sites 0 .. 2L-1 are the inputs of the sublayers (attention and MLP of each layer in turn), site 2L is the final
    read, before the last norm. The decoder runs one loop for every scheme:

        state = residual.start(embedding)
        for site, sublayer in enumerate(sublayers):
            x, state = residual.read(state, site, sublayer.norm)
            state = residual.write(state, sublayer(x), site)
        hidden = norm(residual.finish(state))

    A state is a flat tuple of tensors and is never changed in place: layers take it positionally and return it, so
    activation checkpointing and FSDP see every tensor. A scheme keeps nothing between calls.

    Args:
        options: an instance of the scheme's `Options`, a frozen dataclass whose fields are the keys of the
            `residual` entry of a configuration.
        decoder: the configuration of the decoder (`hidden_size`, `num_hidden_layers`, `num_key_value_heads`).
    """

    Options: ClassVar[type]
    # What a fresh scheme computes beside the stock model: "exact" (bit for bit), "up_to_eps" (up to the eps of the
    # norms and rounding), or None (something else). The contract test holds every scheme to it.
    identity_at_init: ClassVar[Literal["exact", "up_to_eps"] | None] = None

    def __init__(self, options: Any, decoder: Any) -> None:
        super().__init__()
        self.check(options, decoder)
        self.options = options
        self.width: int = decoder.hidden_size
        self.num_layers: int = decoder.num_hidden_layers
        self.num_sites: int = 2 * self.num_layers + 1

    @classmethod
    def check(cls, options: Any, decoder: Any) -> None:
        """Raise ValueError where the options do not fit the decoder. Called before anything is built."""

    def start(self, x: Tensor) -> State:
        """Token embedding (B, T, D) -> the first state."""
        raise NotImplementedError

    def read(self, state: State, site: int, norm: nn.Module) -> tuple[Tensor, State]:
        """The normed input (B, T, D) of sublayer `site`; the norm is passed in so that a kernel may fuse it."""
        raise NotImplementedError

    def write(self, state: State, y: Tensor, site: int) -> State:
        """Record y (B, T, D), the output of sublayer `site`."""
        raise NotImplementedError

    def finish(self, state: State) -> Tensor:
        """The input (B, T, D) of the last norm."""
        raise NotImplementedError

    def site_read(self, state: State, site: int) -> tuple[DepthRead, State] | None:
        """What `site` reads by a softmax over depth: the read and its sources; None where it does not do that."""
        return None

    def source_names(self, site: int) -> tuple[str, ...]:
        """The names of the sources that `site` reads, in order; empty where `site_read` is None."""
        return ()


def as_source(x: Tensor) -> Tensor:
    """x in the dtype of a source: autocast's while it is active, otherwise its own. Streams are never cast."""
    if torch.is_autocast_enabled(x.device.type):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


def sublayer_name(site: int) -> str:
    """The name of sublayer `site`: "attention 0", "mlp 0", "attention 1", ..."""
    return f"{'mlp' if site % 2 else 'attention'} {site // 2}"
