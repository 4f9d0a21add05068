"""One local file to its documents: JSON lines (plain, .xz, .gz, .zst), Parquet, plain text."""

import gzip
import io
import json
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

COMPRESSIONS = (".xz", ".gz", ".zst")
FORMATS = (".jsonl", ".parquet", ".txt")

# What the decompressors and the UTF-8 decoder raise for a file that is cut off or overwritten.
_DAMAGE = (EOFError, OSError, UnicodeDecodeError, lzma.LZMAError, zlib.error)


def file_format(path: Path) -> str:
    """The format of a file by its name: one of FORMATS.

    Raises ValueError for any other name.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
        if suffixes and suffixes[-1] == ".parquet":
            raise ValueError(f"{path}: Parquet is compressed inside; a compressed .parquet file is not read")
    if not suffixes or suffixes[-1] not in FORMATS:
        raise ValueError(f"{path}: unknown extension; wanted .jsonl or .txt (plain, .xz, .gz or .zst) or .parquet")
    return suffixes[-1]


def read_documents(path: Path, text_field: str) -> Iterator[str]:
    """The documents of one file, in file order. A .txt file is one document.

    Raises ValueError, naming the file and where there is one the line, for a damaged file, a line that is not a JSON
    object, and a record without `text_field`; RuntimeError where .parquet or .zst is asked for without pyarrow.
    """
    match file_format(path):
        case ".jsonl":
            return _json_lines(path, text_field)
        case ".parquet":
            return _parquet(path, text_field)
        case _:
            return _plain_text(path)


def _json_lines(path: Path, text_field: str) -> Iterator[str]:
    number = 0
    try:
        with _open_text(path) as lines:
            for number, line in enumerate(lines, start=1):
                if not line.isspace():
                    yield _field(line, text_field, f"{path}, line {number}")
    except _DAMAGE as error:
        raise ValueError(f"{path} is damaged or cannot be read, after line {number}: {error}") from error


def _field(line: str, text_field: str, where: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not valid JSON: {error.msg} at column {error.colno}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where}: wanted a JSON object with a {text_field!r} field, got a {type(record).__name__}")
    return text_of(record, text_field, where)


def text_of(record: dict[str, Any], text_field: str, where: str) -> str:
    """record[text_field]; ValueError, naming `where`, where there is no such field or it is not Unicode text."""
    if text_field not in record:
        raise ValueError(f"{where}: no field {text_field!r}; its fields are {', '.join(record) or 'none'}")
    text = record[text_field]
    if not isinstance(text, str):
        raise ValueError(f"{where}: field {text_field!r} holds {type(text).__name__}, wanted a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can spell and no tokenizer can read
        raise ValueError(f"{where}: field {text_field!r} is not valid Unicode: {error.reason}") from error
    return text


def _plain_text(path: Path) -> Iterator[str]:
    try:
        with _open_text(path) as file:
            yield file.read()
    except _DAMAGE as error:
        raise ValueError(f"{path} is damaged or cannot be read: {error}") from error


def _parquet(path: Path, text_field: str) -> Iterator[str]:
    pyarrow = _pyarrow(path)
    from pyarrow.parquet import ParquetFile

    try:
        file = ParquetFile(path)
        if text_field not in file.schema_arrow.names:
            raise ValueError(f"{path}: no field {text_field!r}; its fields are {', '.join(file.schema_arrow.names)}")
        row = 0
        for batch in file.iter_batches(batch_size=1024, columns=[text_field]):
            for text in batch.column(0).to_pylist():
                row += 1
                yield text_of({text_field: text}, text_field, f"{path}, row {row}")
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is damaged or cannot be read: {error}") from error


def _open_text(path: Path) -> TextIO:
    match path.suffix.lower():
        case ".xz":
            return lzma.open(path, "rt", encoding="utf-8")
        case ".gz":
            return gzip.open(path, "rt", encoding="utf-8")
        case ".zst":
            # Arrow reports a stream that is cut off; the zstandard package ends it in silence.
            stream = _pyarrow(path).input_stream(str(path), compression="zstd")
            return io.TextIOWrapper(stream, encoding="utf-8")
        case _:
            return path.open(encoding="utf-8")


def _pyarrow(path: Path) -> ModuleType:
    try:
        import pyarrow
    except ImportError as error:
        raise RuntimeError(f"reading {path} needs pyarrow: pip install 'depthroute[train]'") from error
    return pyarrow
