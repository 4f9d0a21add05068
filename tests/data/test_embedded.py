import json
import lzma
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import PreTrainedTokenizerFast

from depthroute.data import documents, prepare
from depthroute.data.sources import EMBEDDED
from depthroute.data.splits import document_hash

SPLITS = ("train", "validation")


@pytest.fixture(scope="module")
def records() -> dict[str, list[dict[str, str]]]:
    return {
        split: [json.loads(line) for line in lzma.open(EMBEDDED / f"{split}.jsonl.xz", "rt", encoding="utf-8")]
        for split in SPLITS
    }


def characters(part: list[dict[str, str]]) -> int:
    return sum(len(record["text"]) for record in part)


def test_documents_reads_both_parts(records: dict[str, list[dict[str, str]]]) -> None:
    for split in SPLITS:
        assert list(documents("embedded", split=split)) == [record["text"] for record in records[split]]


def test_held_out_books_are_disjoint_from_train_by_hash_by_book_and_by_author(
    records: dict[str, list[dict[str, str]]],
) -> None:
    train, validation = records["train"], records["validation"]
    assert {document_hash(r["text"]) for r in train}.isdisjoint(document_hash(r["text"]) for r in validation)
    for field in "id", "book", "author":
        assert {r[field] for r in train}.isdisjoint(r[field] for r in validation)
    paragraphs = {p for r in train for p in r["text"].split("\n\n") if len(p) > 60}
    assert not any(p in paragraphs for r in validation for p in r["text"].split("\n\n"))


def test_sizes_are_those_of_a_small_corpus_and_as_its_note_says(records: dict[str, list[dict[str, str]]]) -> None:
    train, validation = characters(records["train"]), characters(records["validation"])
    assert 3_000_000 < train + validation < 5_000_000
    assert validation > 150_000
    assert 0.05 < validation / (train + validation) < 0.08
    note = (EMBEDDED / "SOURCES.md").read_text(encoding="utf-8")
    for split, size in ("train", train), ("validation", validation):
        assert f"| **{split}** | | | {len(records[split])} | {size:,} |" in note
    for record in records["train"] + records["validation"]:
        assert record["author"] in note


def test_the_text_is_clean_prose(records: dict[str, list[dict[str, str]]]) -> None:
    leftovers = re.compile(
        r"gutenberg|transcriber|www\.|http|footnote|\[illustration|[\u2018\u2019\u201c\u201d{}<>|_*]|\r|  ",
        re.IGNORECASE,
    )
    for record in records["train"] + records["validation"]:
        assert not leftovers.search(record["text"]), record["id"]
        assert 2_000 < len(record["text"]) < 22_000
        assert record["text"] == record["text"].strip()


def test_preparing_it_gives_the_books_back_token_by_token(
    tmp_path: Path, recipe: Callable[..., SimpleNamespace], tokenizer: PreTrainedTokenizerFast
) -> None:
    splits = prepare(recipe(sequence_length=256), tmp_path)
    assert splits.dropped_documents == 0
    assert splits.train.num_tokens > 1_000_000
    assert 50_000 < splits.validation.num_tokens < 150_000
    assert 5.5 < splits.unigram_entropy < math.log(2048)
    validation = [token for item in splits.validation for token in item["input_ids"].tolist()]
    first = next(documents("embedded", split="validation"))
    assert tokenizer.decode(validation).startswith(first + "<|endoftext|>")
