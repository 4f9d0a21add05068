"""Where documents come from: the embedded corpus, local files, datasets of the Hugging Face hub."""

import glob
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from depthroute.data.readers import COMPRESSIONS, FORMATS, file_format, read_documents, text_of
from depthroute.errors import nearest_path

EMBEDDED = Path(__file__).parent / "embedded"
EMBEDDED_SPLITS = ("train", "validation")

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


class Source(Protocol):
    """Something that yields documents, always the same ones in the same order."""

    def documents(self, text_field: str) -> Iterator[str]: ...

    def fingerprint(self) -> dict[str, Any]:
        """What the documents depend on, as JSON: equal fingerprints mean equal documents."""
        ...


@dataclass(frozen=True)
class LocalFile:
    """One file on this machine."""

    path: Path

    def documents(self, text_field: str) -> Iterator[str]:
        return read_documents(self.path, text_field)

    def fingerprint(self) -> dict[str, Any]:
        with self.path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"file": self.path.name, "size": self.path.stat().st_size, "sha256": digest}


@dataclass(frozen=True)
class HubDataset:
    """One split of a dataset of the Hugging Face hub, or of a local folder that `datasets` can load; streamed."""

    name: str
    subset: str | None
    split: str

    def documents(self, text_field: str) -> Iterator[str]:
        where = f"dataset {self.name!r}, split {self.split!r}"
        for number, record in enumerate(self._stream(), start=1):
            yield text_of(record, text_field, f"{where}, record {number}")

    def fingerprint(self) -> dict[str, Any]:
        folder = Path(self.name)
        files = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []
        # A file's folders may decide to which split it belongs.
        contents = [{**LocalFile(path).fingerprint(), "file": path.relative_to(folder).as_posix()} for path in files]
        name = folder.name if files else self.name
        return {"dataset": name, "subset": self.subset, "split": self.split, "files": contents}

    def _stream(self) -> Any:
        try:
            import datasets
        except ImportError as error:
            raise RuntimeError(f"dataset {self.name!r} needs datasets: pip install 'depthroute[train]'") from error
        try:
            return datasets.load_dataset(self.name, name=self.subset, split=self.split, streaming=True)
        except (FileNotFoundError, ConnectionError) as error:
            raise FileNotFoundError(
                f"{self.name!r} is neither a local file nor a dataset that can be loaded"
                f"{nearest_path(self.name, 'embedded')} ({_first_line(error)})"
            ) from error
        except (ValueError, OSError) as error:  # an unknown subset or split; a damaged file
            raise ValueError(f"dataset {self.name!r} cannot be loaded: {_first_line(error)}") from error


def documents(
    source: str | Path | Sequence[str | Path],
    *,
    text_field: str = "text",
    subset: str | None = None,
    split: str = "train",
) -> Iterator[str]:
    """The texts of all documents of `source`, one after the other, in an order that depends on nothing but `source`.

    source: "embedded" (the corpus of the package), a path or glob of .jsonl or .txt (plain, .xz, .gz, .zst) or
    .parquet files (a .txt file is one document), the name of a Hugging Face dataset or a folder that
    `datasets.load_dataset` reads, or a list of these. Files of a glob come in the order of their names.
    text_field: the field of a record that holds the text.
    subset, split: which part of a hub dataset; `split` also picks a part of "embedded" ("train" or "validation").
    Documents without any text are left out.

    Raises FileNotFoundError where there is nothing by that name; ValueError for an unknown extension, a damaged file,
    a missing field, and a source without any document; TypeError where `source` is not a name or a list of names.
    """
    sources = resolve(source, subset=subset, split=split)
    return _documents(sources, text_field, source)


def _documents(sources: list[Source], text_field: str, named: object) -> Iterator[str]:
    empty = True
    for source in sources:
        for text in source.documents(text_field):
            if text and not text.isspace():
                empty = False
                yield text
    if empty:
        raise ValueError(f"no documents in {named!r}")


def resolve(source: str | Path | Sequence[str | Path], *, subset: str | None, split: str) -> list[Source]:
    """The sources that a name, or each of a list of names, stands for. Reads nothing yet.

    Raises as `documents` does.
    """
    if isinstance(source, str | Path):
        return _resolve_name(str(source), subset, split)
    if not isinstance(source, Sequence):
        raise TypeError(f"source must be a name, a path or a list of them, got {type(source).__name__}")
    if not source:
        raise ValueError("source is an empty list; wanted at least one name or path")
    return [part for name in source for part in resolve(name, subset=subset, split=split)]


def is_embedded(source: object) -> bool:
    """Whether `source` is the embedded corpus and nothing else."""
    return source == "embedded" or (isinstance(source, list | tuple) and list(source) == ["embedded"])


def _resolve_name(name: str, subset: str | None, split: str) -> list[Source]:
    if name == "embedded":
        if split not in EMBEDDED_SPLITS:
            raise ValueError(f"split {split!r} of the embedded corpus: wanted one of {', '.join(EMBEDDED_SPLITS)}")
        return [LocalFile(EMBEDDED / f"{split}.jsonl.xz")]
    path = Path(name).expanduser()
    if path.is_file():
        return _local_files([path])
    if path.is_dir():
        return [HubDataset(str(path), subset, split)]
    if glob.has_magic(name):
        found = sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file())
        if not found:
            raise FileNotFoundError(f"no file matches {name!r}")
        return _local_files(found)
    if _looks_like_path(name):
        raise FileNotFoundError(f"no such file: {name!r}{nearest_path(path)}")
    return [HubDataset(name, subset, split)]


def _local_files(paths: list[Path]) -> list[Source]:
    for path in paths:
        file_format(path)  # refuse an unknown extension before any work is done
    return [LocalFile(path) for path in paths]


def _looks_like_path(name: str) -> bool:
    known_extension = Path(name).suffix.lower() in (*FORMATS, *COMPRESSIONS)
    return known_extension or name.startswith((".", "/", "~")) or not _HUB_NAME.fullmatch(name)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
