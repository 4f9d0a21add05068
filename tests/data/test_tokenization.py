import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from depthroute.data import load_tokenizer
from depthroute.data.sources import EMBEDDED
from depthroute.data.tokenization import Encoder, fingerprint, vocabulary_size

TEXT = 'It was "très" odd,\n\n  he said —\t日本語, 42 <|endoftext|> times.'
END = "<|endoftext|>"


def test_the_embedded_tokenizer_reads_any_text_and_names_its_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == vocabulary_size(tokenizer) == 2048
    assert tokenizer.eos_token == tokenizer.bos_token == tokenizer.pad_token == END
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT


def test_a_folder_and_a_file_plain_or_xz_give_the_same_tokenizer(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    expected = tokenizer(TEXT)["input_ids"]
    plain, config = EMBEDDED / "tokenizer" / "tokenizer.json", EMBEDDED / "tokenizer" / "tokenizer_config.json"
    packed = tmp_path / "tokenizer.json.xz"
    packed.write_bytes(lzma.compress(plain.read_bytes()))
    (tmp_path / "tokenizer_config.json").write_bytes(config.read_bytes())
    for name in EMBEDDED / "tokenizer", plain, tmp_path, packed:
        loaded = load_tokenizer(str(name))
        assert loaded(TEXT)["input_ids"] == expected
        assert loaded.eos_token_id == tokenizer.eos_token_id


def test_what_is_saved_loads_with_auto_tokenizer_and_is_the_same(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.save_pretrained(tmp_path)
    for again in AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path):
        assert again(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]
        assert again.eos_token == END


def test_gpt2_files_give_the_tokenizer_that_they_describe(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    (tmp_path / "encoder.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (tmp_path / "vocab.bpe").write_text(f"#version: 0.2\n{merges}\n")
    loaded = load_tokenizer(tmp_path)
    assert loaded(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]
    assert loaded.decode(loaded(TEXT)["input_ids"]) == TEXT
    assert (loaded.eos_token, loaded.eos_token_id) == (END, tokenizer.eos_token_id)


def test_end_of_text_is_the_named_eos_token_or_else_the_usual_one_or_else_an_error(
    byte_tokenizer: Callable[..., Path],
) -> None:
    folder = byte_tokenizer("<end>", END)
    assert load_tokenizer(folder).eos_token == END
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    assert load_tokenizer(folder).eos_token == "<end>"
    config.unlink()
    byte_tokenizer("<other>")
    with pytest.raises(ValueError, match=r"has no end-of-text token: no eos_token and no '<\|endoftext\|>'"):
        load_tokenizer(folder)


def test_a_tokenizer_that_is_nowhere_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_pretrained(name: str) -> None:
        raise OSError(f"{name} is not a local folder\nand more advice")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_pretrained)
    with pytest.raises(FileNotFoundError, match=r"^tokenizer 'no/such' is neither here nor on the hub \([^\n]*\)$"):
        load_tokenizer("no/such")


def test_a_damaged_file_is_named(tmp_path: Path, byte_tokenizer: Callable[..., Path]) -> None:
    for name, content in ("tokenizer.json", b"{}"), ("tokenizer.json.xz", b"not xz"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} is not a tokenizer.json file: "):
            load_tokenizer(tmp_path / name)
    folder = byte_tokenizer(END)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not valid JSON"):
        load_tokenizer(folder)


def test_a_slow_tokenizer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name: object())
    with pytest.raises(ValueError, match="tokenizer 'some/slow-one' is not a fast one"):
        load_tokenizer("some/slow-one")


def test_the_encoder_ends_each_text_once_and_reads_special_tokens_in_it_as_text(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    end = tokenizer.eos_token_id
    plain, special = Encoder(tokenizer)(["He left.", TEXT])
    assert plain.tolist() == [*tokenizer("He left.")["input_ids"], end]
    assert special.tolist().count(end) == 1
    assert special[-1] == end
    assert tokenizer.decode(special[:-1]) == TEXT


def test_the_encoder_keeps_every_token_whatever_the_tokenizer_truncates() -> None:
    tokenizer = load_tokenizer("embedded")
    text = TEXT * 100
    expected = Encoder(tokenizer)([text])[0].tolist()
    tokenizer.backend_tokenizer.enable_truncation(8)
    tokenizer.backend_tokenizer.enable_padding(length=4000)
    assert Encoder(tokenizer)([text])[0].tolist() == expected
    assert tokenizer.backend_tokenizer.truncation is not None  # the caller's own settings stay


def test_the_fingerprint_is_of_the_content(
    byte_tokenizer: Callable[..., Path], tokenizer: PreTrainedTokenizerFast
) -> None:
    assert fingerprint(load_tokenizer("embedded")) == fingerprint(tokenizer)
    other = load_tokenizer(byte_tokenizer(END, "<end>"))
    first = fingerprint(other)
    other.eos_token = "<end>"
    assert len({first, fingerprint(other), fingerprint(tokenizer)}) == 3
