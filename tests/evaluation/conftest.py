"""Local evaluation files, made by hand in the forms that the readers know, and tiny saved models."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile

import pytest

from depthroute.data import load_tokenizer
from support.models import move_off_init, routed, stock
from support.sandbox import sandbox  # noqa: F401  (a fixture)

SHAPE = {"num_hidden_layers": 2, "vocab_size": 2048, "max_position_embeddings": 512}
ANSWER_FORMAT = "\n\nAnswer format: "


def json_lines(*items):
    return "".join(json.dumps(item) + "\n" for item in items)


WIKITEXT = """\
 = Lighthouse =\x20
 The lighthouse stands on a rock . It was built by the town in 1901 .\x20
 = = Keeper = =\x20
 The keeper , a quiet man , lit the lamp each night .\x20
 = Harbour =\x20
 Boats leave the harbour at dawn .\x20
"""

HELLASWAG = """\
Rowing: A boat lies on the shore. two women
1
fly over the trees.
push it into the water.
eat the oars.
paint the sky.
Cooking: How to boil an egg. Fill a small pot with water. Put the egg in.
0
Wait until the water boils.
Sell the pot.
Throw the egg at a wall.
Read the egg a book.
"""

QUESTIONS = [
    {
        "question": "A shop has 3 red and 4 blue cups. How many cups has it?",
        "answer": "3 + 4 = <<3+4=7>>7 cups.\n#### 7",
    },
    {"question": "Ann eats 2 plums a day. How many in 5 days?", "answer": "2 * 5 = <<2*5=10>>10 plums.\n#### 10"},
]

HUMANEVAL = [
    {
        "task_id": "Test/0",
        "prompt": 'def double(x):\n    """ Twice x. """\n',
        "entry_point": "double",
        "canonical_solution": "    return 2 * x\n",
        "test": "def check(candidate):\n    assert candidate(2) == 4\n",
    },
    {
        "task_id": "Test/1",
        "prompt": 'def first(xs):\n    """ The first of xs. """\n',
        "entry_point": "first",
        "canonical_solution": "    return xs[0]\n",
        "test": "def check(candidate):\n    assert candidate([5, 6]) == 5\n",
    },
]


def mbpp_item(number):
    return {
        "task_id": number,
        "text": f"Write a function that adds {number} to its argument.",
        "code": f"def add(x):\n    return x + {number}",
        "test_list": [f"assert add({x}) == {x + number}" for x in range(3)],
        "test_setup_code": "",
        "challenge_test_list": [],
    }


def arc_item(question, choices, right):
    listed = " ".join(f"Answer{number}: {choice}" for number, choice in enumerate(choices, 1))
    return {
        "instruction": f"Please choose the correct answer to the question: {question}\n\n{listed}{ANSWER_FORMAT}"
        + "/".join(f"answer{number}" for number in range(1, len(choices) + 1)),
        "input": "",
        "output": f"the correct answer is answer{right}",
        "answer": f"answer{right}",
    }


def boolq_item(question, answer):
    asked = f"Please answer the following question with true or false, question: {question}"
    return {"instruction": f"{asked}{ANSWER_FORMAT}true/false", "output": "", "answer": answer}


FILES = {
    "wikitext2/wiki.test.raw": WIKITEXT.replace("\n", "\r\n"),
    "lambada/lambada_test.jsonl": json_lines(
        {"text": "He took the key and opened the door"}, {"text": "It rained, so she took her umbrella"}
    ),
    "hellaswag/hellaswag_val_full.txt.bz2": HELLASWAG,
    "piqa/valid.jsonl": json_lines(
        {"goal": "Dry a cup", "sol1": "Use a towel.", "sol2": "Use a spoon."},
        {"goal": "Cut bread", "sol1": "Use a cushion.", "sol2": "Use a knife."},
    ),
    "piqa/valid-labels.lst": "0\n1\n",
    "winogrande/dev.jsonl": json_lines(
        {
            "qID": "1",
            "sentence": "The cup fell off the shelf as _ was wet.",
            "option1": "the cup",
            "option2": "the day",
            "answer": "1",
        }
    ),
    "arc/ARC-Easy_test.llm-adapters.json": json.dumps(
        [
            arc_item("What is frozen water?\n\nChoose one.", ["steam", "ice", "sand", "oil"], 2),
            arc_item("Which of these is an animal?", ["stone", "chair", "cat"], 3),
        ]
    ),
    "arc/ARC-Challenge_test.llm-adapters.json": json.dumps(
        [arc_item("What do plants take from the sun?", ["light", "salt", "rain", "wind"], 1)]
    ),
    "boolq/boolq_val_questions_only.llm-adapters.json": json.dumps(
        [boolq_item("is ice cold?", "true"), boolq_item("is fire wet?", "false")]
    ),
    "gsm8k/train.jsonl.xz": json_lines(*QUESTIONS, *QUESTIONS, *QUESTIONS),
    "gsm8k/test.jsonl": json_lines(*QUESTIONS),
    "humaneval/HumanEval.jsonl.gz": json_lines(*HUMANEVAL),
    "mbpp/mbpp.jsonl": json_lines(*map(mbpp_item, (2, 11, 12, 600))),
    "math/test.jsonl.xz": json_lines(
        {"question": "What is $1+1$?", "level": "Level 1", "type": "Algebra", "answer": r"It is $\boxed{2}$."},
        {"question": "What is $7-4$?", "level": "Level 1", "type": "Prealgebra", "answer": r"It is $\boxed{3}$."},
    ),
}
MMLU_HEAD = "question,choice0,choice1,choice2,choice3,answer\n"
MMLU = {
    "mmlu/dev/anatomy_dev.csv": f'{MMLU_HEAD}"Eyes, what for?",see,hear,eat,walk,0\n',
    "mmlu/test/anatomy_test.csv": f"{MMLU_HEAD}How many thumbs?,1,2,3,4,1\n",
}
COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.fixture
def data_root(tmp_path):
    root = tmp_path / "data"
    for name, text in FILES.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(COMPRESS.get(file.suffix, bytes)(text.encode()))
    with tarfile.open(root / "mmlu.tar.xz", "w:xz") as archive:
        for name, text in MMLU.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return root


@pytest.fixture
def save(tmp_path):
    """save(name, residual, seed): the folder of a tiny model with a tokenizer; the stock model for residual None."""

    def write(name, residual=None, seed=0):
        folder = tmp_path / name
        model = stock("llama", seed, **SHAPE) if residual is None else routed(residual, "llama", seed, **SHAPE)
        if residual != {"scheme": "additive"}:
            move_off_init(model, std=0.02)
        model.save_pretrained(folder)
        load_tokenizer("embedded").save_pretrained(folder)
        return folder

    return write
