"""Small corpora, a small tokenizer and a data recipe to change one field of at a time."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from depthroute.data import load_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return load_tokenizer("embedded")


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[[str, list[str]], str]:
    """Writes texts as tmp_path/<name> and returns the path as a string, as a recipe holds it."""

    def write(name: str, texts: list[str]) -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., SimpleNamespace]:
    """The data section of a recipe, with what a test wants changed."""

    def make(**changes: Any) -> SimpleNamespace:
        fields: dict[str, Any] = {
            "train": "embedded",
            "validation": None,
            "held_out_fraction": 0.2,
            "text_field": "text",
            "subset": None,
            "tokenizer": "embedded",
            "sequence_length": 16,
            "max_tokens": None,
            "max_validation_tokens": None,
        }
        assert changes.keys() <= fields.keys()
        return SimpleNamespace(**fields | changes)

    return make


@pytest.fixture
def byte_tokenizer(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tokenizer of 256 bytes and the given special tokens, and returns its folder."""

    def write(*special: str) -> Path:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = Tokenizer(models.BPE(vocab={byte: n for n, byte in enumerate(alphabet)}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(list(special))
        folder = tmp_path / "bytes"
        folder.mkdir(exist_ok=True)
        backend.save(str(folder / "tokenizer.json"))
        return folder

    return write
