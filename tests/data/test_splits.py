import json
import math
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from depthroute.data import PackedTokens, prepare
from depthroute.data.packing import TokenWriter
from depthroute.data.splits import is_held_out, unigram_entropy
from depthroute.data.tokenization import Encoder

Recipe = Callable[..., SimpleNamespace]
WriteJsonl = Callable[[str, list[str]], str]


def sentences(count: int, start: int = 0) -> list[str]:
    """`count` different documents of a few dozen tokens."""
    return [
        f"Document {n} says that {n} and {n + 1} make {2 * n + 1}, as you know." for n in range(start, start + count)
    ]


def tokens(packed: PackedTokens) -> list[int]:
    """The whole token file, the tail too."""
    return np.fromfile(packed.path, dtype=packed.dtype).tolist()


def texts(packed: PackedTokens, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The documents of a token file, each of which ends with the end-of-text token."""
    *whole, rest = tokenizer.decode(tokens(packed)).split("<|endoftext|>")
    assert rest == ""
    return whole


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that were tokenised, in order."""
    seen: list[str] = []
    encode = Encoder.__call__

    def spy(self: Encoder, batch: list[str]) -> list[np.ndarray]:
        seen.extend(batch)
        return encode(self, batch)

    monkeypatch.setattr(Encoder, "__call__", spy)
    return seen


def test_held_out_and_train_are_a_partition_of_the_documents(
    tmp_path: Path, recipe: Recipe, write_jsonl: WriteJsonl, tokenizer: PreTrainedTokenizerFast
) -> None:
    corpus = sentences(500)
    splits = prepare(recipe(train=write_jsonl("a.jsonl", corpus)), tmp_path / "cache")
    train, validation = texts(splits.train, tokenizer), texts(splits.validation, tokenizer)
    assert train == [text for text in corpus if not is_held_out(text, 0.2)]
    assert validation == [text for text in corpus if is_held_out(text, 0.2)]
    assert 70 < len(validation) < 130


def test_the_same_text_is_always_on_the_same_side(
    tmp_path: Path, recipe: Recipe, write_jsonl: WriteJsonl, tokenizer: PreTrainedTokenizerFast
) -> None:
    corpus = sentences(60)
    copies = [text + end for end in ("", "\n", "  ") for text in corpus]
    splits = prepare(recipe(train=write_jsonl("a.jsonl", copies)), tmp_path / "cache")
    train, validation = (
        Counter(text.strip() for text in texts(part, tokenizer)) for part in (splits.train, splits.validation)
    )
    assert train.keys().isdisjoint(validation.keys())
    assert set((train + validation).values()) == {3}


def test_a_larger_fraction_holds_out_more_of_the_same(recipe: Recipe) -> None:
    corpus = sentences(1000)
    few, many = ({text for text in corpus if is_held_out(text, fraction)} for fraction in (0.01, 0.5))
    assert few < many
    assert 400 < len(many) < 600


def test_train_documents_that_are_in_the_validation_source_are_dropped_counted_and_said(
    tmp_path: Path,
    recipe: Recipe,
    write_jsonl: WriteJsonl,
    tokenizer: PreTrainedTokenizerFast,
    caplog: pytest.LogCaptureFixture,
) -> None:
    shared = sentences(7, start=40)
    train = write_jsonl("a.train.jsonl", sentences(30) + shared + shared[:2])
    validation = write_jsonl("a.val.jsonl", sentences(20, start=100) + [text + "\n" for text in shared])
    data = recipe(train=train, validation=validation)
    for _ in "made", "cached":
        caplog.clear()
        splits = prepare(data, tmp_path / "cache")
        assert splits.dropped_documents == 9
        assert "left out 9 train documents that are also in the validation data" in caplog.text
        assert texts(splits.train, tokenizer) == sentences(30)
        assert len(texts(splits.validation, tokenizer)) == 27


def test_a_train_glob_that_takes_in_the_validation_file_does_not_leak_it(
    tmp_path: Path, recipe: Recipe, write_jsonl: WriteJsonl, tokenizer: PreTrainedTokenizerFast
) -> None:
    write_jsonl("a.train-000.jsonl", sentences(30))
    validation = write_jsonl("a.val.jsonl", sentences(20, start=100))
    splits = prepare(recipe(train=str(tmp_path / "a.*.jsonl"), validation=validation), tmp_path / "cache")
    assert splits.dropped_documents == 20
    assert texts(splits.train, tokenizer) == sentences(30)


def test_the_validation_source_of_a_dataset_is_its_validation_split(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch, tokenizer: PreTrainedTokenizerFast
) -> None:
    parts = {"train": sentences(30), "validation": sentences(20, start=100)}

    def load_dataset(path: str, name: str | None, split: str, streaming: bool) -> list[dict[str, str]]:
        assert (path, name, streaming) == ("some/corpus", "small", True)
        return [{"text": text} for text in parts[split]]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = recipe(train="some/corpus", validation=["some/corpus"], subset="small")
    splits = prepare(data, tmp_path / "cache")
    assert texts(splits.train, tokenizer) == parts["train"]
    assert texts(splits.validation, tokenizer) == parts["validation"]


def test_token_limits_end_both_sides_exactly_there(
    tmp_path: Path, recipe: Recipe, write_jsonl: WriteJsonl, tokenizer: PreTrainedTokenizerFast
) -> None:
    corpus = sentences(500)
    data = recipe(train=write_jsonl("a.jsonl", corpus), max_tokens=1000, max_validation_tokens=100)
    splits = prepare(data, tmp_path / "cache")
    assert splits.train.num_tokens == 1000
    assert splits.validation.num_tokens == 100
    everything = prepare(recipe(train=data.train), tmp_path / "cache")
    assert tokens(splits.train) == tokens(everything.train)[:1000]
    assert tokens(splits.validation) == tokens(everything.validation)[:100]


def test_documents_past_a_full_validation_part_are_still_not_trained_on(
    tmp_path: Path, recipe: Recipe, write_jsonl: WriteJsonl, tokenizer: PreTrainedTokenizerFast
) -> None:
    corpus = sentences(300)
    data = recipe(train=write_jsonl("a.jsonl", corpus), max_validation_tokens=32)
    train = texts(prepare(data, tmp_path / "cache").train, tokenizer)
    assert train == [text for text in corpus if not is_held_out(text, 0.2)]


def test_max_tokens_stops_reading_the_stream(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch, write_jsonl: WriteJsonl
) -> None:
    monkeypatch.setattr("depthroute.data.splits._BATCH_CHARACTERS", 1000)
    path = write_jsonl("a.jsonl", sentences(200))
    with open(path, "a") as file:
        file.write("this line is not JSON, and is never reached\n")
    splits = prepare(recipe(train=path, max_tokens=500), tmp_path / "cache")
    assert splits.train.num_tokens == 500


def test_batches_of_the_tokenizer_change_nothing(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch, write_jsonl: WriteJsonl
) -> None:
    data = recipe(train=write_jsonl("a.jsonl", sentences(200)), max_tokens=1500)
    files = []
    for characters in 1, 700, 10**9:
        monkeypatch.setattr("depthroute.data.splits._BATCH_CHARACTERS", characters)
        splits = prepare(data, tmp_path / f"cache-{characters}")
        files.append(tokens(splits.train))
    assert files[0] == files[1] == files[2]


def test_the_second_call_tokenises_nothing_and_gives_the_same(
    tmp_path: Path, recipe: Recipe, write_jsonl: WriteJsonl, encoded: list[str]
) -> None:
    data = recipe(train=write_jsonl("a.jsonl", sentences(100)))
    first = prepare(data, tmp_path / "cache")
    assert len(encoded) == 100
    again = prepare(data, tmp_path / "cache")
    assert len(encoded) == 100
    assert again.unigram_entropy == first.unigram_entropy
    assert tokens(again.train) == tokens(first.train)


def test_another_sequence_length_packs_the_same_tokens(
    tmp_path: Path, recipe: Recipe, write_jsonl: WriteJsonl, encoded: list[str]
) -> None:
    path = write_jsonl("a.jsonl", sentences(100))
    lengths = [prepare(recipe(train=path, sequence_length=length), tmp_path / "cache") for length in (16, 64)]
    assert len(encoded) == 100
    assert [splits.train.sequence_length for splits in lengths] == [16, 64]
    assert lengths[0].train.path == lengths[1].train.path


def test_a_file_that_moved_is_the_same_and_one_that_changed_is_not(
    tmp_path: Path, recipe: Recipe, write_jsonl: WriteJsonl, encoded: list[str]
) -> None:
    data = recipe(train=write_jsonl("a.jsonl", sentences(100)))
    prepare(data, tmp_path / "cache")
    (tmp_path / "elsewhere").mkdir()
    os.replace(data.train, tmp_path / "elsewhere" / "a.jsonl")
    data.train = str(tmp_path / "elsewhere" / "a.jsonl")
    prepare(data, tmp_path / "cache")
    assert len(encoded) == 100
    changed = Path(data.train).read_text().replace("Document 7 ", "Document 8 ", 1)  # same size, same name
    Path(data.train).write_text(changed)
    prepare(data, tmp_path / "cache")
    assert len(encoded) == 200


@pytest.mark.parametrize(
    "change",
    [
        {"held_out_fraction": 0.3},
        {"max_tokens": 700},
        {"max_validation_tokens": 100},
        {"text_field": "body"},
        {"tokenizer": "bytes"},
        {"validation": "b.jsonl"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_setting_that_changes_the_tokens_is_part_of_the_cache_key(
    tmp_path: Path, recipe: Recipe, change: dict[str, Any], byte_tokenizer: Recipe, write_jsonl: WriteJsonl
) -> None:
    records = [{"text": text, "body": text[::-1]} for text in sentences(100)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    write_jsonl("b.jsonl", sentences(20, start=500))
    placeholders = {"bytes": str(byte_tokenizer("<|endoftext|>")), "b.jsonl": str(tmp_path / "b.jsonl")}
    change = {key: placeholders.get(value, value) for key, value in change.items()}
    data = recipe(train=str(tmp_path / "a.jsonl"))
    before = prepare(data, tmp_path / "cache")
    after = prepare(recipe(train=data.train, **change), tmp_path / "cache")
    assert before.train.path != after.train.path
    assert (tokens(before.train), tokens(before.validation)) != (tokens(after.train), tokens(after.validation))


def test_a_crash_in_the_middle_leaves_nothing_and_the_next_call_starts_over(
    tmp_path: Path, recipe: Recipe, write_jsonl: WriteJsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = recipe(train=write_jsonl("a.jsonl", sentences(100)))
    with monkeypatch.context() as patch:
        patch.setattr("depthroute.data.splits.os.replace", fail)
        with pytest.raises(KeyboardInterrupt):
            prepare(data, tmp_path / "cache")
    assert [path for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []
    assert prepare(data, tmp_path / "cache").train.num_tokens > 0


def fail(*arguments: object) -> None:
    raise KeyboardInterrupt


def test_a_killed_process_leaves_nothing_that_is_taken_for_whole(
    tmp_path: Path, recipe: Recipe, write_jsonl: WriteJsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = recipe(train=write_jsonl("a.jsonl", sentences(100)))
    with monkeypatch.context() as patch:
        patch.setattr(TokenWriter, "write", kill_this_process)
        child = multiprocessing.get_context("fork").Process(target=prepare, args=(data, tmp_path / "cache"))
        child.start()
        child.join(timeout=60)
    assert child.exitcode == -signal.SIGKILL
    assert [path.name for path in (tmp_path / "cache").glob("*.partial-*")] != []
    splits = prepare(data, tmp_path / "cache")
    assert splits.train.num_tokens > 0
    assert list((tmp_path / "cache").glob("*.partial-*")) == []


def kill_this_process(*arguments: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_two_at_once_tokenise_once_and_get_the_same(
    tmp_path: Path, recipe: Recipe, write_jsonl: WriteJsonl, encoded: list[str]
) -> None:
    data = recipe(train=write_jsonl("a.jsonl", sentences(100)))
    results: list[list[int]] = []
    threads = [
        threading.Thread(target=lambda: results.append(tokens(prepare(data, tmp_path / "cache").train)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(encoded) == 100
    assert results[0] == results[1] == results[2]


def test_a_token_file_that_was_cut_off_later_is_named(tmp_path: Path, recipe: Recipe, write_jsonl: WriteJsonl) -> None:
    data = recipe(train=write_jsonl("a.jsonl", sentences(100)))
    path = prepare(data, tmp_path / "cache").train.path
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"train\.bin is damaged: \d+ tokens, not \d+; delete "):
        prepare(data, tmp_path / "cache")


def test_the_unigram_entropy_is_that_of_the_add_one_smoothed_train_counts(
    tmp_path: Path, recipe: Recipe, write_jsonl: WriteJsonl
) -> None:
    splits = prepare(recipe(train=write_jsonl("a.jsonl", sentences(200))), tmp_path / "cache")
    counts, validation = Counter(tokens(splits.train)), tokens(splits.validation)
    total, vocabulary = sum(counts.values()), 2048
    expected = -sum(math.log((counts[token] + 1) / (total + vocabulary)) for token in validation) / len(validation)
    assert splits.unigram_entropy == pytest.approx(expected, rel=1e-12)


def test_the_unigram_entropy_without_any_knowledge_is_that_of_a_uniform_guess() -> None:
    assert unigram_entropy(np.zeros(50), np.arange(50)) == pytest.approx(math.log(50))


def test_a_split_with_less_than_a_sequence_on_one_side_is_an_error_with_its_numbers(
    tmp_path: Path, recipe: Recipe, write_jsonl: WriteJsonl
) -> None:
    path = write_jsonl("a.jsonl", sentences(20))
    few = r"^data\.validation: .* 0 tokens in 0 documents, less than one sequence of 16 .* \(data\.held_out_fraction\)"
    with pytest.raises(ValueError, match=few):
        prepare(recipe(train=path, held_out_fraction=1e-9), tmp_path / "cache")
    with pytest.raises(ValueError, match=r"^data\.train: .* 12 tokens in 1 documents, less than one sequence of 16"):
        prepare(recipe(train=path, max_tokens=12), tmp_path / "cache")
    with pytest.raises(ValueError, match=r"^data\.train: .* \d+ tokens in \d+ documents, less than one .* of 9999"):
        prepare(recipe(train=path, sequence_length=9999), tmp_path / "cache")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sequence_length": 1}, "sequence_length must be at least 2, got 1"),
        ({"held_out_fraction": 0.0}, r"held_out_fraction must be between 0 and 1, got 0\.0"),
        ({"held_out_fraction": 1.0}, r"held_out_fraction must be between 0 and 1, got 1\.0"),
        ({"max_tokens": 0}, "max_tokens must be positive or null, got 0"),
        ({"max_validation_tokens": -5}, "max_validation_tokens must be positive or null, got -5"),
        ({"subset": "small"}, "subset 'small' is for hub datasets, and the sources are all files"),
        ({"text_field": "body"}, r"a\.jsonl, line 1: no field 'body'; its fields are text"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_values_are_errors_and_leave_no_cache(
    tmp_path: Path, recipe: Recipe, write_jsonl: WriteJsonl, change: dict[str, Any], message: str
) -> None:
    data = recipe(**{"train": write_jsonl("a.jsonl", sentences(20))} | change)
    with pytest.raises(ValueError, match=message):
        prepare(data, tmp_path / "cache")
    assert not [path for path in tmp_path.glob("cache/*") if path.is_dir()]


def test_a_missing_file_is_an_error_before_anything_is_tokenised(
    tmp_path: Path, recipe: Recipe, write_jsonl: WriteJsonl, encoded: list[str]
) -> None:
    data = recipe(train=write_jsonl("a.jsonl", sentences(20)), validation=str(tmp_path / "missing.jsonl"))
    with pytest.raises(FileNotFoundError, match=r"no such file: '.*missing\.jsonl'"):
        prepare(data, tmp_path / "cache")
    assert encoded == []


def test_the_embedded_corpus_brings_its_own_held_out_books_in_a_list_too(
    tmp_path: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("depthroute.data.splits._BATCH_CHARACTERS", 1000)
    data = recipe(train=["embedded"], max_tokens=5000, max_validation_tokens=5000)
    splits = prepare(data, tmp_path / "cache")
    assert splits.validation.num_tokens == 5000
    data.train = "embedded"
    assert splits.train.path == prepare(data, tmp_path / "cache").train.path


def test_meta_says_what_the_files_are_made_from(tmp_path: Path, recipe: Recipe, write_jsonl: WriteJsonl) -> None:
    splits = prepare(recipe(train=write_jsonl("a.jsonl", sentences(100))), tmp_path / "cache")
    meta = json.loads((splits.train.path.parent / "meta.json").read_text())
    assert meta["train"]["tokens"] == splits.train.num_tokens
    assert meta["train"]["documents"] + meta["validation"]["documents"] == 100
    assert meta["made_from"]["train"][0]["file"] == "a.jsonl"
    assert (meta["dtype"], meta["vocabulary_size"]) == ("uint16", 2048)


def test_progress_is_not_printed_where_nobody_looks(
    tmp_path: Path, recipe: Recipe, write_jsonl: WriteJsonl, capfd: pytest.CaptureFixture[str]
) -> None:
    prepare(recipe(train=write_jsonl("a.jsonl", sentences(50))), tmp_path / "cache")
    assert "tokenising" not in capfd.readouterr().err
