"""The order in which sequences are trained on: fixed by the seed alone."""

import hashlib
from typing import Any

import torch
from torch.utils.data import Dataset

from depthroute.data.packing import PackedTokens


class EpochOrder(Dataset):
    """A view of `length` items over the sequences of `packed`, epoch after epoch, each epoch in its own order.

    With n = len(packed), item i is packed[permutation[i % n]], where the permutation is drawn from (seed, i // n)
    alone. Read from front to back it uses every sequence once in each epoch, and what comes at step s is the same for
    any batch size, number of ranks or workers, and after any restart.

    Raises ValueError where `packed` holds no whole sequence or `length` is negative.
    """

    def __init__(self, packed: PackedTokens, seed: int, length: int) -> None:
        if len(packed) == 0:
            raise ValueError(
                f"packed holds {packed.num_tokens} tokens, wanted at least one sequence of {packed.sequence_length}"
            )
        if length < 0:
            raise ValueError(f"length must not be negative, got {length}")
        self.packed = packed
        self.seed = seed
        self.length = length
        self._epoch = -1
        self._permutation = torch.empty(0, dtype=torch.int64)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self.length:
            raise IndexError(f"item {index} of {self.length}")
        epoch, position = divmod(index, len(self.packed))
        return self.packed[int(self._permutation_of(epoch)[position])]

    def _permutation_of(self, epoch: int) -> torch.Tensor:
        # One epoch at a time: items are read from front to back, so this draws once for each epoch and worker.
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(_generator_seed(self.seed, epoch))
            self._permutation = torch.randperm(len(self.packed), generator=generator)
            self._epoch = epoch
        return self._permutation

    def __getstate__(self) -> dict[str, Any]:
        # Workers draw their own permutation rather than receive a copy of it.
        return self.__dict__ | {"_epoch": -1, "_permutation": torch.empty(0, dtype=torch.int64)}


def _generator_seed(seed: int, epoch: int) -> int:
    # Hashed, since seed + epoch would give epoch 1 of seed 0 the order of epoch 0 of seed 1.
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
