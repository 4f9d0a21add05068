"""Flat token files: written once, read as packed sequences without padding."""

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch.utils.data import Dataset


def token_dtype(vocabulary_size: int) -> np.dtype:
    """The smallest unsigned type that holds every id: uint16 or uint32."""
    return np.dtype(np.uint16 if vocabulary_size <= 2**16 else np.uint32)


class PackedTokens(Dataset):
    """The whole sequences of a flat token file, which is memory-mapped.

    Item i is {"input_ids": int64 (T,), "labels": int64 (T,)}: tokens i * T to (i + 1) * T of the file, twice (the
    model shifts the labels). The last `num_tokens` % T tokens of the file belong to no sequence.
    """

    def __init__(self, path: Path, *, dtype: np.dtype, sequence_length: int) -> None:
        if not path.is_file():
            raise FileNotFoundError(f"no token file {str(path)!r}")
        self.path = path
        self.dtype = dtype
        self.sequence_length = sequence_length
        self.num_tokens = path.stat().st_size // dtype.itemsize

    def __len__(self) -> int:
        return self.num_tokens // self.sequence_length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        start = index * self.sequence_length
        tokens = self._tokens[start : start + self.sequence_length]
        input_ids = torch.from_numpy(tokens.astype(np.int64))
        return {"input_ids": input_ids, "labels": input_ids.clone()}

    @cached_property
    def _tokens(self) -> np.ndarray:
        return np.memmap(self.path, dtype=self.dtype, mode="r")

    def __getstate__(self) -> dict[str, Any]:
        # A pickled memmap is a copy of the whole file: workers map it anew.
        return {key: value for key, value in self.__dict__.items() if key != "_tokens"}


class TokenWriter:
    """Writes documents as one flat token file of at most `max_tokens` tokens, and counts each token id."""

    def __init__(self, path: Path, *, vocabulary_size: int, max_tokens: int | None) -> None:
        self.num_tokens = 0
        self.num_documents = 0
        self.counts = np.zeros(vocabulary_size, dtype=np.int64)
        self._dtype = token_dtype(vocabulary_size)
        self._max_tokens = max_tokens
        self._file = path.open("wb")

    @property
    def full(self) -> bool:
        """Whether `max_tokens` tokens are written; more documents would be ignored."""
        return self._max_tokens is not None and self.num_tokens >= self._max_tokens

    def write(self, documents: Iterable[np.ndarray]) -> None:
        """Append the ids of each document. The document that reaches `max_tokens` is cut there."""
        kept: list[np.ndarray] = []
        for ids in documents:
            if self.full:
                break
            if self._max_tokens is not None:
                ids = ids[: self._max_tokens - self.num_tokens]
            kept.append(ids)
            self.num_tokens += len(ids)
            self.num_documents += 1
        if kept:
            tokens = np.concatenate(kept)
            tokens.astype(self._dtype).tofile(self._file)
            self.counts += np.bincount(tokens, minlength=len(self.counts))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
