"""Every reader gives the documents that lm-eval's tasks expect, and refuses what is not its form."""

from __future__ import annotations

import bz2

import pytest

from depthroute.evaluation import readers


def test_wikitext_is_cut_into_articles_with_its_blank_lines(data_root):
    first, second = readers.wikitext(data_root / "wikitext2/wiki.test.raw")
    assert first["page"].split("\n") == [
        " = Lighthouse = ",
        " ",
        " The lighthouse stands on a rock . It was built by the town in 1901 . ",
        " ",
        " = = Keeper = = ",
        " ",
        " The keeper , a quiet man , lit the lamp each night . ",
        " ",
        " ",
    ]
    assert second["page"] == " = Harbour = \n \n Boats leave the harbour at dawn . \n "


def test_wikitext_with_blank_lines_is_left_as_it_is(tmp_path):
    file = tmp_path / "wiki.raw"
    text = " \n = One = \n \n Text . \n \n = Two = \n \n More . \n"
    file.write_text(text)
    pages = [document["page"] for document in readers.wikitext(file)]
    assert pages == [" = One = \n \n Text . \n ", " = Two = \n \n More . "]


def test_hellaswag_cuts_off_the_unfinished_sentence(data_root):
    rowing, cooking = readers.hellaswag(data_root / "hellaswag/hellaswag_val_full.txt.bz2")
    assert (rowing["activity_label"], rowing["ctx_a"], rowing["ctx_b"], rowing["label"]) == (
        "Rowing",
        "A boat lies on the shore.",
        "two women",
        "1",
    )
    assert cooking["ctx_a"].endswith("Put the egg in.")
    assert cooking["ctx_b"] == ""
    assert len(rowing["endings"]) == 4


def test_hellaswag_with_a_line_too_many(tmp_path):
    file = tmp_path / "items.txt.bz2"
    file.write_bytes(bz2.compress(b"Rowing: A boat.\n1\na\nb\nc\nd\ne\n"))
    with pytest.raises(ValueError, match="7 lines; wanted six an item"):
        list(readers.hellaswag(file))


def test_arc_gives_back_the_question(data_root):
    ice, cat = readers.arc(data_root / "arc/ARC-Easy_test.llm-adapters.json")
    assert ice["question"] == "What is frozen water?\n\nChoose one."
    assert ice["choices"] == {"text": ["steam", "ice", "sand", "oil"], "label": ["1", "2", "3", "4"]}
    assert ice["answerKey"] == "2"
    assert cat["choices"]["text"] == ["stone", "chair", "cat"]


def test_boolq_has_no_passage(data_root):
    first, second = readers.boolq(data_root / "boolq/boolq_val_questions_only.llm-adapters.json")
    assert first == {"passage": "", "question": "is ice cold", "label": 1}
    assert second["label"] == 0


def test_mbpp_is_the_test_split(data_root):
    assert [item["task_id"] for item in readers.mbpp(data_root / "mbpp/mbpp.jsonl")] == [11, 12]


def test_math_by_subject(data_root):
    (item,) = readers.math(data_root / "math/test.jsonl.xz", "prealgebra")
    assert (item["problem"], item["solution"]) == ("What is $7-4$?", r"It is $\boxed{3}$.")


def test_mmlu_by_subject_and_split(data_root):
    (item,) = readers.mmlu(data_root / "mmlu.tar.xz", "anatomy", "dev")
    assert item["question"] == "Eyes, what for?"
    assert (item["choices"], item["answer"]) == (["see", "hear", "eat", "walk"], 0)


def test_piqa_without_its_labels(data_root):
    (data_root / "piqa/valid-labels.lst").unlink()
    with pytest.raises(FileNotFoundError, match=r"no valid-labels\.lst beside it"):
        list(readers.piqa(data_root / "piqa/valid.jsonl"))


@pytest.mark.parametrize(
    ("reader", "text", "message"),
    [
        (readers.json_lines, '{"a": 1}\n{"a"\n', "line 2: not JSON"),
        (readers.json_lines, "[1]\n", "line 1: a list; wanted a JSON object"),
        (readers.arc, '{"a": 1}', "a dict; wanted a list"),
        (readers.arc, '[{"instruction": "What?"}]', "item 0 has no instruction of the form"),
        (readers.boolq, "[", "not JSON"),
    ],
)
def test_other_forms_are_refused(tmp_path, reader, text, message):
    file = tmp_path / "file"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        list(reader(file))
