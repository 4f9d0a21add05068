"""Tokenizers by name, and texts to token ids in batches."""

import hashlib
import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from depthroute.data.sources import EMBEDDED
from depthroute.errors import nearest_path

END_OF_TEXT = "<|endoftext|>"


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerFast:
    """The fast tokenizer of that name, with its end-of-text token set as `eos_token`.

    name: "embedded" (2,048 tokens, made for the embedded corpus); a folder with tokenizer.json (or tokenizer.json.xz),
    with GPT-2's encoder.json and vocab.bpe, or with anything else that AutoTokenizer reads; a tokenizer.json file; or
    a name on the Hugging Face hub. A tokenizer that names no `eos_token` gets "<|endoftext|>" if it has that token.

    Raises FileNotFoundError where there is nothing by that name; ValueError for a damaged file, a tokenizer that is
    not a fast one, and one without an end-of-text token.
    """
    tokenizer = _load(str(name))
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"tokenizer {str(name)!r} is not a fast one (backed by the tokenizers library)")
    if tokenizer.eos_token is None:
        if END_OF_TEXT not in tokenizer.get_vocab():
            raise ValueError(f"tokenizer {str(name)!r} has no end-of-text token: no eos_token and no {END_OF_TEXT!r}")
        tokenizer.eos_token = END_OF_TEXT
    return tokenizer


def vocabulary_size(tokenizer: PreTrainedTokenizerFast) -> int:
    """One more than the largest token id."""
    return max(tokenizer.get_vocab().values()) + 1


def fingerprint(tokenizer: PreTrainedTokenizerFast) -> str:
    """A hash of all that decides which ids a text gets."""
    definition = tokenizer.backend_tokenizer.to_str()
    return hashlib.sha256(f"{tokenizer.eos_token_id} {definition}".encode()).hexdigest()


class Encoder:
    """Texts to token ids, each text followed by the end-of-text token.

    Nothing in a text becomes a special token: the end-of-text token ends documents and is found nowhere else.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._end_of_text = int(tokenizer.eos_token_id)
        # A copy, since these settings are the caller's own on the tokenizer that came in.
        self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text, int64 (tokens + 1,)."""
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array([*encoding.ids, self._end_of_text], dtype=np.int64) for encoding in encodings]


def _load(name: str) -> Any:
    path = EMBEDDED / "tokenizer" if name == "embedded" else Path(name).expanduser()
    if path.is_file():
        return _from_file(path, settings={})
    if not path.is_dir():
        return _from_hub(name)
    if (path / "tokenizer.json").is_file():
        return _from_file(path / "tokenizer.json", _settings(path))
    if (path / "tokenizer.json.xz").is_file():
        return _from_file(path / "tokenizer.json.xz", _settings(path))
    if (path / "encoder.json").is_file() and (path / "vocab.bpe").is_file():
        return _from_gpt2_files(path)
    return _from_hub(name)


def _from_file(path: Path, settings: dict[str, Any]) -> PreTrainedTokenizerFast:
    try:
        content = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        backend = Tokenizer.from_buffer(content)
    except (lzma.LZMAError, ValueError) as error:
        raise ValueError(f"{path} is not a tokenizer.json file: {error}") from error
    return PreTrainedTokenizerFast(tokenizer_object=backend, **settings)


def _settings(folder: Path) -> dict[str, Any]:
    """What tokenizer_config.json says about special tokens and the chat; the class that it names is not needed."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    tokens = ("bos_token", "eos_token", "pad_token", "unk_token")
    settings = {key: _content(config[key]) for key in tokens if config.get(key) is not None}
    plain = ("model_max_length", "chat_template", "clean_up_tokenization_spaces")
    return settings | {key: config[key] for key in plain if key in config}


def _content(token: str | dict[str, Any]) -> str:
    return token["content"] if isinstance(token, dict) else token


def _from_gpt2_files(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of OpenAI's own two files: the vocabulary as JSON, the merges as lines."""
    backend = Tokenizer(models.BPE.from_file(str(folder / "encoder.json"), str(folder / "vocab.bpe")))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END_OF_TEXT, bos_token=END_OF_TEXT)


def _from_hub(name: str) -> Any:
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        hint = nearest_path(name, "embedded")
        raise FileNotFoundError(f"tokenizer {name!r} is neither here nor on the hub{hint} ({reason})") from error
