import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from depthroute.data.packing import PackedTokens, TokenWriter, token_dtype

DOCUMENTS = [np.arange(start, start + size) for start, size in ((0, 7), (100, 1), (200, 13), (300, 4))]
ALL = np.concatenate(DOCUMENTS).tolist()


def write(path: Path, *, vocabulary_size: int = 1000, max_tokens: int | None = None) -> TokenWriter:
    with TokenWriter(path, vocabulary_size=vocabulary_size, max_tokens=max_tokens) as writer:
        writer.write(DOCUMENTS[:3])
        writer.write(DOCUMENTS[3:])
        writer.write([])
    return writer


def read(packed: PackedTokens) -> list[int]:
    return [token for i in range(len(packed)) for token in packed[i]["input_ids"].tolist()]


@pytest.mark.parametrize("vocabulary_size", [1000, 2**16, 2**16 + 1])
@pytest.mark.parametrize("sequence_length", [2, 4, 25])
def test_packing_loses_no_token_but_the_tail(tmp_path: Path, vocabulary_size: int, sequence_length: int) -> None:
    write(tmp_path / "tokens.bin", vocabulary_size=vocabulary_size)
    dtype = token_dtype(vocabulary_size)
    packed = PackedTokens(tmp_path / "tokens.bin", dtype=dtype, sequence_length=sequence_length)
    assert packed.num_tokens == len(ALL) == 25
    assert len(packed) == 25 // sequence_length
    assert read(packed) == ALL[: len(packed) * sequence_length]


def test_ids_are_stored_in_two_bytes_where_they_fit() -> None:
    assert token_dtype(2**16) == np.uint16
    assert token_dtype(2**16 + 1) == np.uint32


def test_large_ids_survive(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "tokens.bin", vocabulary_size=152_000, max_tokens=None) as writer:
        writer.write([np.array([151_999, 65_536, 0, 1])])
    packed = PackedTokens(tmp_path / "tokens.bin", dtype=token_dtype(152_000), sequence_length=4)
    assert read(packed) == [151_999, 65_536, 0, 1]


def test_an_item_is_int64_and_its_labels_are_its_inputs_in_memory_of_their_own(tmp_path: Path) -> None:
    write(tmp_path / "tokens.bin")
    item = PackedTokens(tmp_path / "tokens.bin", dtype=token_dtype(1000), sequence_length=5)[1]
    assert item["input_ids"].dtype == item["labels"].dtype == torch.int64
    assert item["input_ids"].shape == (5,)
    assert torch.equal(item["input_ids"], item["labels"])
    item["labels"][:] = -100
    assert item["input_ids"].min() >= 0


def test_past_the_last_whole_sequence_is_an_index_error_so_that_iteration_ends(tmp_path: Path) -> None:
    write(tmp_path / "tokens.bin")
    packed = PackedTokens(tmp_path / "tokens.bin", dtype=token_dtype(1000), sequence_length=4)
    assert len(list(packed)) == 6
    for index in 6, -1:
        with pytest.raises(IndexError, match=f"sequence {index} of 6"):
            packed[index]


def test_a_worker_gets_the_path_and_not_the_tokens(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "tokens.bin", vocabulary_size=1000, max_tokens=None) as writer:
        writer.write([np.arange(100_000) % 1000])
    packed = PackedTokens(tmp_path / "tokens.bin", dtype=token_dtype(1000), sequence_length=100)
    first = packed[7]
    sent = pickle.dumps(packed)
    assert len(sent) < 2000
    assert torch.equal(pickle.loads(sent)[7]["input_ids"], first["input_ids"])


@pytest.mark.parametrize(("max_tokens", "documents"), [(1, 1), (7, 1), (8, 2), (20, 3), (21, 3), (22, 4), (99, 4)])
def test_max_tokens_ends_the_file_exactly_there(tmp_path: Path, max_tokens: int, documents: int) -> None:
    writer = write(tmp_path / "tokens.bin", max_tokens=max_tokens)
    tokens = np.fromfile(tmp_path / "tokens.bin", dtype=np.uint16).tolist()
    assert tokens == ALL[:max_tokens]
    assert (writer.num_tokens, writer.num_documents) == (len(tokens), documents)
    assert writer.full == (max_tokens <= 25)
    assert writer.counts.sum() == len(tokens)


def test_every_token_id_is_counted(tmp_path: Path) -> None:
    writer = write(tmp_path / "tokens.bin")
    assert writer.counts.tolist() == np.bincount(ALL, minlength=1000).tolist()


def test_a_missing_token_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no token file '.*tokens\.bin'"):
        PackedTokens(tmp_path / "tokens.bin", dtype=token_dtype(1000), sequence_length=4)
