import gzip
import json
import lzma
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from depthroute.data import documents
from depthroute.data.sources import HubDataset

TEXTS = ["One.\n\nTwo.", "A second document, with an é.", "The third."]


def jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(texts)).encode()


def zstd(content: bytes) -> bytes:
    return pyarrow.compress(content, codec="zstd", asbytes=True)


COMPRESS: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".xz": lzma.compress, ".gz": gzip.compress, ".zst": zstd}


@pytest.mark.parametrize("suffix", COMPRESS)
def test_json_lines_give_their_texts_whatever_the_compression(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(COMPRESS[suffix](jsonl(TEXTS)))
    assert list(documents(path)) == TEXTS


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_text_file_is_one_document(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(COMPRESS[suffix](TEXTS[0].encode()))
    assert list(documents(str(path))) == TEXTS[:1]


def test_parquet_gives_its_text_column(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"body": TEXTS, "n": [1, 2, 3]}), path)
    assert list(documents(path, text_field="body")) == TEXTS


def test_a_list_keeps_its_order_and_a_glob_goes_by_name(tmp_path: Path) -> None:
    for name in ("c", "a", "b"):
        (tmp_path / f"{name}.txt").write_text(name)
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "d.txt").write_text("d")
    assert list(documents(str(tmp_path / "*.txt"))) == ["a", "b", "c"]
    assert sorted(documents(str(tmp_path / "**" / "*.txt"))) == ["a", "b", "c", "d"]
    assert list(documents([tmp_path / "c.txt", str(tmp_path / "[ab].txt")])) == ["c", "a", "b"]


def test_documents_without_text_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n" + jsonl(["", TEXTS[0], " \n", TEXTS[1]]) + b"\n")
    assert list(documents(path)) == TEXTS[:2]


def test_local_files_need_neither_datasets_nor_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(jsonl(TEXTS)))
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert list(documents(tmp_path / "a.jsonl.xz")) == TEXTS
    with pytest.raises(RuntimeError, match=r"a\.parquet needs pyarrow"):
        list(documents(tmp_path / "a.parquet"))
    with pytest.raises(RuntimeError, match="'some/dataset' needs datasets"):
        list(documents("some/dataset"))


def test_a_folder_is_streamed_by_datasets_split_by_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "train.jsonl").write_bytes(jsonl(TEXTS))
    (folder / "validation.jsonl").write_bytes(jsonl(["Held out."]))
    assert list(documents(folder)) == TEXTS
    assert list(documents(str(folder), split="validation")) == ["Held out."]
    with pytest.raises(ValueError, match=r"split 'train', record 1: no field 'body'; its fields are id, text"):
        list(documents(folder, text_field="body"))
    with pytest.raises(ValueError, match=r"dataset '.*corpus' cannot be loaded: "):
        list(documents(folder, split="test"))


def test_a_hub_dataset_is_asked_for_by_name_subset_and_split_and_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def load_dataset(path: str, **options: object) -> list[dict[str, str]]:
        asked.update(options, path=path)
        return [{"text": text} for text in TEXTS]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert list(documents("HuggingFaceFW/fineweb-edu", subset="sample-10BT")) == TEXTS
    assert asked == {"path": "HuggingFaceFW/fineweb-edu", "name": "sample-10BT", "split": "train", "streaming": True}


@pytest.mark.parametrize("kind", [datasets.exceptions.DatasetNotFoundError, ConnectionError])
def test_a_dataset_that_is_nowhere_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, kind: type[Exception]) -> None:
    def load_dataset(path: str, **options: object) -> None:
        raise kind(f"Dataset '{path}' doesn't exist.\nMore advice.")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(
        FileNotFoundError, match=r"^'no/such' is neither a local file nor a dataset .* \(.*doesn't exist\.\)$"
    ):
        list(documents("no/such"))


@pytest.mark.parametrize("name", ["missing.jsonl", "./missing", "/missing/folder", "a/b/c", "missing.jsonl.xz"])
def test_a_missing_file_is_not_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"no such file: '{name}'"):
        documents(name)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("boks.txt", "books.txt"),
        ("./boks.txt", "books.txt"),
        ("texts/boks.txt", "texts/books.txt"),
        ("text/books.txt", "texts"),
    ],
)
def test_a_misspelt_file_names_the_nearest_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, meant: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for place in ("books.txt", "texts/books.txt"):
        (tmp_path / place).write_text("x")
    with pytest.raises(FileNotFoundError, match=f"no such file: '{name}'; did you mean '{meant}'\\?$"):
        documents(name)


@pytest.mark.parametrize(("name", "meant"), [("embeded", "embedded"), ("boks", "books.txt"), ("sea/boks", "seas")])
def test_a_misspelt_name_may_have_meant_what_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, meant: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", Mock(side_effect=ConnectionError("no network")))
    (tmp_path / "books.txt").write_text("x")
    (tmp_path / "seas").mkdir()
    with pytest.raises(FileNotFoundError, match=rf"; did you mean '{meant}'\? \(no network\)$"):
        list(documents(name))


def test_a_glob_without_a_match_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file matches '.*\*\.jsonl'"):
        documents(str(tmp_path / "*.jsonl"))


@pytest.mark.parametrize("name", ["a.csv", "a", "a.json", "a.xz", "a.csv.gz"])
def test_an_unknown_extension_is_refused_before_anything_is_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("x")
    with pytest.raises(ValueError, match=rf"{name}: unknown extension; wanted \.jsonl or \.txt"):
        documents(tmp_path / name)


def test_compressed_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet.gz").write_text("x")
    with pytest.raises(ValueError, match=r"compressed \.parquet file is not read"):
        documents(tmp_path / "a.parquet.gz")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "a"', r"a\.jsonl, line 4: not valid JSON: .* at column"),
        (b'["text"]', r"a\.jsonl, line 4: wanted a JSON object with a 'text' field, got a list"),
        (b'{"body": "a", "id": 1}', r"a\.jsonl, line 4: no field 'text'; its fields are body, id"),
        (b'{"text": 7}', r"a\.jsonl, line 4: field 'text' holds int, wanted a string"),
        (b'{"text": null}', r"a\.jsonl, line 4: field 'text' holds NoneType, wanted a string"),
        (b'{"text": "\\ud800"}', r"a\.jsonl, line 4: field 'text' is not valid Unicode"),
    ],
)
def test_a_bad_line_is_named_with_its_file(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(TEXTS) + line + b"\n")
    with pytest.raises(ValueError, match=message):
        list(documents(path))


@pytest.mark.parametrize("suffix", [".xz", ".gz", ".zst"])
@pytest.mark.parametrize("kind", [".jsonl", ".txt"])
def test_a_compressed_file_that_is_cut_off_or_not_one_is_damaged(tmp_path: Path, suffix: str, kind: str) -> None:
    whole = COMPRESS[suffix](jsonl([f"Text {n}" for n in range(10_000)]))
    path = tmp_path / f"a{kind}{suffix}"
    for content in whole[: len(whole) // 2], whole[:-3], b"not compressed at all":
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"a{kind}{suffix} is damaged or cannot be read"):
            list(documents(path))


def test_bytes_that_are_not_utf8_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "\xff\xfe"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl is damaged .*utf-8"):
        list(documents(path))


def test_bad_parquet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"not parquet")
    with pytest.raises(ValueError, match=r"a\.parquet is damaged"):
        list(documents(path))
    pyarrow.parquet.write_table(pyarrow.table({"body": TEXTS}), path)
    with pytest.raises(ValueError, match=r"a\.parquet: no field 'text'; its fields are body"):
        list(documents(path))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None]}), path)
    with pytest.raises(ValueError, match=r"a\.parquet, row 2: field 'text' holds NoneType"):
        list(documents(path))


def test_an_empty_corpus_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / "b.txt").write_text("\n")
    with pytest.raises(ValueError, match=r"no documents in \['.*a\.jsonl', '.*b\.txt'\]"):
        list(documents([str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")]))
    with pytest.raises(ValueError, match="source is an empty list"):
        documents([])


def test_a_source_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="source must be a name, a path or a list of them, got int"):
        documents(7)  # type: ignore[arg-type]


def test_an_unknown_split_of_the_embedded_corpus_is_refused() -> None:
    with pytest.raises(ValueError, match="split 'test' of the embedded corpus: wanted one of train, validation"):
        documents("embedded", split="test")


def test_a_folder_is_another_one_where_its_files_lie_in_other_folders(tmp_path: Path) -> None:
    for split, text in (("train", "a"), ("test", "b")):
        (tmp_path / split).mkdir()
        (tmp_path / split / "part.jsonl").write_bytes(jsonl([text]))
    before = HubDataset(str(tmp_path), None, "train").fingerprint()
    (tmp_path / "train").rename(tmp_path / "validation")
    (tmp_path / "test").rename(tmp_path / "train")
    assert HubDataset(str(tmp_path), None, "train").fingerprint() != before
