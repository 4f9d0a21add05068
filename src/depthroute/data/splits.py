"""A data recipe to train and held-out tokens, disjoint by document, prepared once and cached by content."""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from filelock import FileLock
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerFast

from depthroute.data.packing import PackedTokens, TokenWriter, token_dtype
from depthroute.data.sources import HubDataset, documents, is_embedded, resolve
from depthroute.data.tokenization import Encoder, fingerprint, load_tokenizer, vocabulary_size

logger = logging.getLogger(__name__)

# Part of the cache key: raise it whenever the same inputs would give other files.
_LAYOUT = 1
_BATCH_CHARACTERS = 2_000_000


class DataRecipe(Protocol):
    """What `prepare` reads of a recipe's `data` section."""

    train: Any  # a source, or a list of them: see `documents`
    validation: Any  # the same, or None: hold out a part of `train`
    held_out_fraction: float  # of the documents
    text_field: str
    subset: str | None
    tokenizer: str
    sequence_length: int
    max_tokens: int | None
    max_validation_tokens: int | None


@dataclass(frozen=True)
class Splits:
    """Tokens to train on and tokens to evaluate on, with no document in both.

    unigram_entropy: nats for each token of `validation` under the word frequencies of `train`. Precisely, with c(w)
    the count of token w in the train file, C their sum and V the vocabulary size, the mean over all tokens w of the
    validation file of -log((c(w) + 1) / (C + V)), end-of-text tokens included. A model whose held-out loss is lower
    has learned more than how often each token comes.
    dropped_documents: documents of the train source that were left out because the validation source holds them too.
    key: the same for the same tokens; another one where files, tokenizer or recipe differ.
    """

    train: PackedTokens
    validation: PackedTokens
    tokenizer: PreTrainedTokenizerFast
    unigram_entropy: float
    dropped_documents: int
    key: str


def prepare(data: DataRecipe, cache_dir: str | Path) -> Splits:
    """The packed train and validation tokens of a data recipe, tokenised on the first call and cached after that.

    Without `data.validation` a document is held out if the hash of its text falls into `held_out_fraction`, so the
    same text is always on the same side; the embedded corpus has held-out books of its own instead. With
    `data.validation` (its split "validation" if it is a hub dataset), train documents whose text is also in it are
    dropped, and counted. `max_tokens` and `max_validation_tokens` end the two token files exactly there.

    The cache is keyed by content: files by name, size and hash, hub datasets by name, subset and split, the tokenizer
    by its whole definition. It is written whole or not at all; a second process waits for the first.

    Raises ValueError for values out of range and for a split that leaves less than one sequence on either side, and
    what `documents` and `load_tokenizer` raise.
    """
    _check(data)
    tokenizer = load_tokenizer(data.tokenizer)
    folder = _cached(data, tokenizer, Path(cache_dir))
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    _check_sizes(meta, data)
    if meta["dropped_documents"]:
        logger.warning("left out %d train documents that are also in the validation data", meta["dropped_documents"])
    dtype = np.dtype(meta["dtype"])
    train, validation = (
        PackedTokens(folder / f"{part}.bin", dtype=dtype, sequence_length=data.sequence_length)
        for part in ("train", "validation")
    )
    for packed, part in (train, "train"), (validation, "validation"):
        if packed.num_tokens != meta[part]["tokens"]:
            raise ValueError(
                f"{packed.path} is damaged: {packed.num_tokens} tokens, not {meta[part]['tokens']}; delete {folder}"
            )
    return Splits(train, validation, tokenizer, meta["unigram_entropy"], meta["dropped_documents"], folder.name)


def is_held_out(text: str, fraction: float) -> bool:
    """Whether a document is in the held-out part: decided by the hash of its text, and nothing else."""
    return int.from_bytes(document_hash(text)[:8], "big") < fraction * 2**64


def document_hash(text: str) -> bytes:
    """SHA-256 of the text, without the white space around it."""
    return hashlib.sha256(text.strip().encode()).digest()


def _cached(data: DataRecipe, tokenizer: PreTrainedTokenizerFast, cache_dir: Path) -> Path:
    """The folder with the token files of this recipe, made if it is not there yet."""
    made_from = _describe(data, tokenizer)
    key = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:24]
    folder = cache_dir / key
    if not folder.is_dir():
        cache_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(cache_dir / f"{key}.lock"):
            if not folder.is_dir():
                _make(data, tokenizer, folder, made_from)
    return folder


def _make(data: DataRecipe, tokenizer: PreTrainedTokenizerFast, folder: Path, made_from: dict[str, Any]) -> None:
    """Write `folder` under another name first: it appears whole, or not at all."""
    for left_behind in folder.parent.glob(f"{folder.name}.partial-*"):  # by a process that was killed
        shutil.rmtree(left_behind)
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        meta = _write_tokens(data, tokenizer, partial)
        text = json.dumps(meta | {"made_from": made_from}, indent=2, allow_nan=False)
        (partial / "meta.json").write_text(text, encoding="utf-8")
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _describe(data: DataRecipe, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Everything that the token files depend on, as JSON."""
    validation = _validation_source(data)
    return {
        "layout": _LAYOUT,
        "train": _fingerprints(data.train, data.subset, "train"),
        "validation": None if validation is None else _fingerprints(validation, data.subset, "validation"),
        "held_out_fraction": data.held_out_fraction if validation is None else None,
        "text_field": data.text_field,
        "tokenizer": fingerprint(tokenizer),
        "max_tokens": data.max_tokens,
        "max_validation_tokens": data.max_validation_tokens,
    }


def _fingerprints(source: Any, subset: str | None, split: str) -> list[dict[str, Any]]:
    return [part.fingerprint() for part in resolve(source, subset=subset, split=split)]


def _validation_source(data: DataRecipe) -> Any:
    if data.validation is None and is_embedded(data.train):
        return "embedded"
    return data.validation


def _write_tokens(data: DataRecipe, tokenizer: PreTrainedTokenizerFast, folder: Path) -> dict[str, Any]:
    """Tokenise both sides into `folder`; returns what meta.json says of them."""
    encoder, size = Encoder(tokenizer), vocabulary_size(tokenizer)
    held_out_by_source = _validation_source(data) is not None
    with (
        TokenWriter(folder / "train.bin", vocabulary_size=size, max_tokens=data.max_tokens) as train,
        TokenWriter(
            folder / "validation.bin", vocabulary_size=size, max_tokens=data.max_validation_tokens
        ) as validation,
    ):
        write = _write_two_sources if held_out_by_source else _write_one_source
        dropped = write(data, encoder, train, validation)
    return {
        "dtype": token_dtype(size).name,
        "vocabulary_size": size,
        "train": {"tokens": train.num_tokens, "documents": train.num_documents},
        "validation": {"tokens": validation.num_tokens, "documents": validation.num_documents},
        "dropped_documents": dropped,
        "unigram_entropy": unigram_entropy(train.counts, validation.counts) if validation.num_tokens else None,
    }


def _write_one_source(data: DataRecipe, encoder: Encoder, train: TokenWriter, validation: TokenWriter) -> int:
    """Hold out by hash. A held-out document is never trained on, not even when `validation` is full."""
    for batch in _batches(data, data.train, "train", train):
        held_out = [is_held_out(text, data.held_out_fraction) for text in batch]
        if not validation.full:
            validation.write(encoder([text for text, out in zip(batch, held_out, strict=True) if out]))
        train.write(encoder([text for text, out in zip(batch, held_out, strict=True) if not out]))
    return 0


def _write_two_sources(data: DataRecipe, encoder: Encoder, train: TokenWriter, validation: TokenWriter) -> int:
    """Write the validation source first, then what of the train source is not in it. Returns how many were."""
    seen: set[bytes] = set()
    for batch in _batches(data, _validation_source(data), "validation", validation):
        seen.update(map(document_hash, batch))
        validation.write(encoder(batch))
    dropped = 0
    for batch in _batches(data, data.train, "train", train):
        kept = [text for text in batch if document_hash(text) not in seen]
        dropped += len(batch) - len(kept)
        train.write(encoder(kept))
    return dropped


def _batches(data: DataRecipe, source: Any, split: str, writer: TokenWriter) -> Iterator[list[str]]:
    """Documents of a source in batches for the tokenizer, until they end or `writer` is full."""
    texts = documents(source, text_field=data.text_field, subset=data.subset, split=split)
    limit = data.max_tokens if split == "train" else data.max_validation_tokens
    with tqdm(desc=f"tokenising {split}", total=limit, unit=" tokens", unit_scale=True, disable=None) as progress:
        for batch in _by_characters(texts, _BATCH_CHARACTERS):
            yield batch
            progress.update(writer.num_tokens - progress.n)
            if writer.full:
                return


def _by_characters(texts: Iterator[str], characters: int) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def unigram_entropy(train_counts: np.ndarray, validation_counts: np.ndarray) -> float:
    """Nats for each validation token under the add-one smoothed train frequencies: see `Splits`."""
    log_probability = np.log(train_counts + 1.0) - np.log(train_counts.sum() + len(train_counts))
    return float(-(validation_counts @ log_probability) / validation_counts.sum())


def _check(data: DataRecipe) -> None:
    if data.sequence_length < 2:
        raise ValueError(f"sequence_length must be at least 2, got {data.sequence_length}")
    if _validation_source(data) is None and not 0 < data.held_out_fraction < 1:
        raise ValueError(f"held_out_fraction must be between 0 and 1, got {data.held_out_fraction}")
    sources = resolve(data.train, subset=data.subset, split="train")
    if data.validation is not None:
        sources += resolve(data.validation, subset=data.subset, split="validation")
    if data.subset is not None and not any(isinstance(source, HubDataset) for source in sources):
        raise ValueError(f"subset {data.subset!r} is for hub datasets, and the sources are all files")
    for name, value in ("max_tokens", data.max_tokens), ("max_validation_tokens", data.max_validation_tokens):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be positive or null, got {value}")


def _check_sizes(meta: dict[str, Any], data: DataRecipe) -> None:
    for part in "train", "validation":
        tokens, count = meta[part]["tokens"], meta[part]["documents"]
        if tokens < data.sequence_length:
            raise ValueError(
                f"data.{part}: this part has {tokens} tokens in {count} documents, less than one sequence of "
                f"{data.sequence_length} tokens (data.sequence_length){_advice(data)}"
            )


def _advice(data: DataRecipe) -> str:
    if _validation_source(data) is not None:
        return "; change the token limits or the sources"
    return (
        f"; held out is a fraction of {data.held_out_fraction} of the documents (data.held_out_fraction), and a .txt "
        "file is one document: name texts of your own to hold out (data.validation), raise the fraction, or change the "
        "token limits or the sources"
    )
