"""Probing saved models: what is found is written and shown, and what cannot be probed is refused in one line."""

from __future__ import annotations

import json
from io import StringIO

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from depthroute.data import load_tokenizer
from depthroute.data.tokenization import Encoder
from depthroute.probing import print_probe, probe_folder
from depthroute.probing.folder import sequences_in_halves
from support.models import move_off_init, routed, stock

SCHEMES = {
    "single": {"scheme": "mhar", "num_heads": 1},
    "mhar": {"scheme": "mhar", "num_heads": 2},
    "block_mhar": {"scheme": "block_mhar", "num_heads": 1, "block_layers": 2},
    "delta_mhar": {"scheme": "delta_mhar", "num_heads": 2, "block_layers": 2},
}
SHAPE = {"num_hidden_layers": 2, "vocab_size": 2048}


@pytest.fixture
def save(tmp_path):
    def write(residual, place="model", **overrides):
        folder = tmp_path / place
        move_off_init(routed(residual, **{**SHAPE, **overrides}), std=0.2).save_pretrained(folder)
        load_tokenizer("embedded").save_pretrained(folder)
        return folder

    return write


def lines(folder):
    """A text of several documents."""
    path = folder / "text.jsonl"
    texts = [f"Document {i} tells of the river, the stone and the {i} green houses over it." for i in range(12)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_found_is_returned_and_written_beside_the_model(save, tmp_path, scheme):
    folder = save(SCHEMES[scheme])
    found = probe_folder(folder, text=lines(tmp_path), tokens=200, draws=2)
    assert json.loads((folder / "probe.json").read_text()) == found
    assert found["tokens"] == sum(found["heads"]["tokens_by_half"]) == 200
    assert found["num_heads"] == SCHEMES[scheme]["num_heads"]
    assert (found["disagreement"] is not None) == (found["num_heads"] == 1)
    assert (found["heads"]["deviation"] is not None) == (found["num_heads"] > 1)
    assert {site["site"] for site in found["collinearity"]["sites"]} == {
        site["site"] for site in found["heads"]["sites"]
    }
    assert str(tmp_path) not in json.dumps(found)


def test_the_held_out_documents_of_the_embedded_corpus_are_the_default(save, tmp_path):
    found = probe_folder(save(SCHEMES["single"]), tokens=300, draws=1, out=tmp_path / "elsewhere" / "found.json")
    assert found["text"] == "the embedded corpus, held-out documents"
    assert found["sequence_length"] == 256  # of the model
    assert json.loads((tmp_path / "elsewhere" / "found.json").read_text()) == found
    assert not (tmp_path / "model" / "probe.json").exists()


def test_a_run_folder_is_probed_at_the_length_that_it_was_trained_on(save, tmp_path):
    run = save(SCHEMES["mhar"], "run/final").parent
    (run / "recipe.yaml").write_text("data: {sequence_length: 16}\n")
    found = probe_folder(run, text=lines(tmp_path), tokens=100, draws=1)
    assert (found["model"], found["sequence_length"]) == ("run", 16)
    assert (run / "probe.json").is_file()
    assert probe_folder(run / "final", text=lines(tmp_path), tokens=100, draws=1)["model"] == "run"
    longer = probe_folder(run, text=lines(tmp_path), tokens=100, draws=1, sequence_length=32)
    assert longer["sequence_length"] == 32


def test_the_halves_share_no_document_and_have_as_many_tokens():
    encode = Encoder(load_tokenizer("embedded"))
    texts = ["a stone " * n for n in (40, 5, 5, 5, 60, 9, 9, 30)]
    sizes = [len(ids) for ids in encode(texts)]
    batches = list(sequences_in_halves(texts, encode, tokens=60, length=8))
    by_half = [torch.cat([b["input_ids"][0] for b in batches if int(b["half"]) == half]) for half in (0, 1)]
    assert [len(ids) for ids in by_half] == [30, 30]
    assert all(b["input_ids"].shape[1] <= 8 for b in batches)
    # The first document fills the first half, so the second half holds the others, in their order.
    others = [i for ids in encode(texts[1:]) for i in ids.tolist()]
    assert sizes[0] > 30
    assert by_half[0].tolist() == encode(texts[:1])[0][:30].tolist()
    assert by_half[1].tolist() == others[:30]


def test_a_short_text_is_used_up(save, tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("one document of a few words")
    found = probe_folder(save(SCHEMES["mhar"]), text=[path], draws=1)
    assert found["text"] == "one.txt"
    assert found["heads"]["tokens_by_half"][1] == 0
    assert found["heads"]["deviation"]["split_half"]["r"] is None


@pytest.mark.parametrize(
    ("scheme", "shown"),
    [
        ("single", ["KL of 4 slices, contiguous", "interleaved", "equal strength", "cosine of two sources"]),
        ("mhar", ["largest deviation of a head", "its correlation on other text", "by chance -1.00", "even: 1"]),
    ],
)
def test_the_table_is_short_and_fits_a_terminal(save, tmp_path, scheme, shown):
    found = probe_folder(save(SCHEMES[scheme]), text=lines(tmp_path), tokens=100, draws=2)
    out = StringIO()
    print_probe(found, Console(file=out, width=80))
    for text in shown:
        assert text in out.getvalue()
    assert len(out.getvalue().splitlines()) < 15


@pytest.mark.parametrize("is_terminal", [False, True])
def test_no_label_of_the_table_is_cut(save, tmp_path, is_terminal):
    found = probe_folder(save(SCHEMES["mhar"]), text=lines(tmp_path), tokens=100, draws=2)
    out = StringIO()
    print_probe(found, Console(file=out, width=44, force_terminal=is_terminal, color_system=None))
    assert "…" not in out.getvalue()
    assert ("correlation of heads (by chance -1.00)" in out.getvalue()) != is_terminal  # there it goes on below


def test_a_model_that_lacks_weights_is_not_probed(save):
    folder = save(SCHEMES["mhar"])
    weights = load_file(folder / "model.safetensors")
    weights.pop("model.residual.reads.1.query")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="its weights lack"):
        probe_folder(folder, tokens=100)
    assert not (folder / "probe.json").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("boks.txt", r"no such file: .*boks\.txt'; did you mean '.*books\.txt'\?"),
        ("empty.txt", "no documents in"),
    ],
)
def test_a_text_that_is_not_there_is_told_before_the_model_is_loaded(save, tmp_path, monkeypatch, text, said):
    (tmp_path / "books.txt").write_text("x")
    (tmp_path / "empty.txt").write_text("")
    folder = save(SCHEMES["mhar"])
    monkeypatch.setattr("depthroute.probing.folder.load_saved", lambda _: pytest.fail("the model was loaded"))
    with pytest.raises((FileNotFoundError, ValueError), match=said):
        probe_folder(folder, text=[tmp_path / text])


def test_what_cannot_be_probed_is_refused(save, tmp_path):
    with pytest.raises(FileNotFoundError, match="no model in"):
        probe_folder(tmp_path)
    with pytest.raises(ValueError, match=r"out is .*, which is a folder; wanted a file"):
        probe_folder(save(SCHEMES["mhar"]), tokens=100, out=tmp_path)
    with pytest.raises(ValueError, match="the scheme 'additive', which reads nothing over depth"):
        probe_folder(save({"scheme": "additive"}, "plain"))
    with pytest.raises(ValueError, match=r"tokenizer in .* has 2048 tokens, the model only 1000"):
        probe_folder(save(SCHEMES["mhar"], "small", vocab_size=1000))
    folder = save(SCHEMES["single"])
    with pytest.raises(FileNotFoundError, match=r"no such file: .*nowhere\.jsonl"):
        probe_folder(folder, text=tmp_path / "nowhere.jsonl")
    with pytest.raises(ValueError, match="slices is 7"):
        probe_folder(folder, text=lines(tmp_path), slices=7)
    with pytest.raises(ValueError, match=r"sequence_length is 257; the model in .* has 256 positions"):
        probe_folder(folder, sequence_length=257)
    (folder / "recipe.yaml").write_text("data: [")
    with pytest.raises(ValueError, match=r"recipe.yaml holds no data.sequence_length"):
        probe_folder(folder)
    with pytest.raises(ValueError, match="tokens is 1"):
        probe_folder(folder, tokens=1)
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(FileNotFoundError, match="has no tokenizer beside it"):
        probe_folder(folder)
    stock(**SHAPE).save_pretrained(tmp_path / "stock")
    load_tokenizer("embedded").save_pretrained(tmp_path / "stock")
    with pytest.raises(TypeError, match="holds a Qwen3ForCausalLM"):
        probe_folder(tmp_path / "stock")
