"""Local evaluation files in the forms that they come in, read into the documents that lm-eval's tasks expect.

A reader takes one path and gives the documents in the order of the file, with the fields of the hub's dataset that
prompts and metrics use. Where the file lacks something of the hub's form, the reader says what it makes of that.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Document = dict[str, Any]

MATH_SUBJECTS = {
    "algebra": "Algebra",
    "counting_and_prob": "Counting & Probability",
    "geometry": "Geometry",
    "intermediate_algebra": "Intermediate Algebra",
    "num_theory": "Number Theory",
    "prealgebra": "Prealgebra",
    "precalc": "Precalculus",
}

_OPEN: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_MBPP_TEST = range(11, 511)  # task_id of the test split, by the authors' README
_ARC_QUESTION = "Please choose the correct answer to the question: "
_BOOLQ_QUESTION = "Please answer the following question with true or false, question: "
_ANSWER_FORMAT = "\n\nAnswer format: "
_ARC_CHOICE = re.compile(r"(?:^| )Answer(\d): ")
_LAST_SENTENCE = re.compile(r"(.*[.?!]\S*) (\S.*)", re.DOTALL)


def json_lines(path: Path) -> Iterator[Document]:
    """One JSON object a line, as it stands."""
    with _text(path) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _object(line, path, number)


def wikitext(path: Path) -> Iterator[Document]:
    """{"page"}: one article a document, as in the hub's document-level set: cut before each title of first rank.

    In a copy without blank lines, those around headings and after articles are put back.
    """
    with _text(path) as file:
        lines = file.read().replace("\r\n", "\n").removesuffix("\n").split("\n")
    if all(line.strip() for line in lines):
        lines = _with_blank_lines(lines)
    article: list[str] = []
    for line in [*lines, " = end of the file = "]:
        if _is_title(line):
            if any(part.strip() for part in article):
                yield {"page": "\n".join(article)}
            article = []
        article.append(line)


def hellaswag(path: Path) -> Iterator[Document]:
    """Six lines an item: "label: context", the index of the right ending, four endings.

    The context is one text, while lm-eval wants its last, unfinished sentence apart, to capitalise it. In an item of
    ActivityNet that is what follows the last full stop; an item of WikiHow, which begins with "How to", has none.
    """
    with _text(path) as file:
        lines = file.read().splitlines()
    if len(lines) % 6:
        raise ValueError(f"{path}: {len(lines)} lines; wanted six an item")
    for start in range(0, len(lines), 6):
        head, label, *endings = lines[start : start + 6]
        activity, colon, context = head.partition(": ")
        if not colon or label not in ("0", "1", "2", "3"):
            raise ValueError(f"{path}, line {start + 1}: no item of the form 'label: context', index, four endings")
        found = None if context.startswith("How to ") else _LAST_SENTENCE.fullmatch(context)
        first, last = found.groups() if found else (context, "")
        if not context.startswith("How to ") and not found:
            first, last = "", context
        yield {"activity_label": activity, "ctx_a": first, "ctx_b": last, "endings": endings, "label": label}


def piqa(path: Path) -> Iterator[Document]:
    """The questions of `path`, with the labels from `<name>-labels.lst` beside it."""
    labels = path.with_name(f"{path.name.partition('.')[0]}-labels.lst")
    if not labels.is_file():
        raise FileNotFoundError(f"{path}: its labels are missing, there is no {labels.name} beside it")
    documents, answers = list(json_lines(path)), labels.read_text(encoding="utf-8").split()
    if len(documents) != len(answers):
        raise ValueError(f"{path}: {len(documents)} questions and {len(answers)} labels in {labels.name}")
    for document, answer in zip(documents, answers, strict=True):
        yield {**document, "label": int(answer)}


def arc(path: Path) -> Iterator[Document]:
    """Questions that were rewritten as instructions: the question and its choices are taken out of them again."""
    for number, item in enumerate(_json_list(path)):
        body = _between(item.get("instruction"), _ARC_QUESTION, _ANSWER_FORMAT, path, number)
        question, _, choices = body.rpartition("\n\n")
        numbered = _ARC_CHOICE.split(choices)[1:]
        labels, texts = numbered[::2], numbered[1::2]
        answer = str(item.get("answer")).removeprefix("answer")
        if not question or answer not in labels:
            raise ValueError(f"{path}: item {number} has no question with numbered answers, one of them right")
        yield {"question": question, "choices": {"text": texts, "label": labels}, "answerKey": answer}


def boolq(path: Path) -> Iterator[Document]:
    """Questions alone, without the passages that they are about: the passage is empty."""
    for number, item in enumerate(_json_list(path)):
        question = _between(item.get("instruction"), _BOOLQ_QUESTION, _ANSWER_FORMAT, path, number)
        if item.get("answer") not in ("true", "false"):
            raise ValueError(f"{path}: item {number} has the answer {item.get('answer')!r}; wanted true or false")
        yield {"passage": "", "question": question.removesuffix("?"), "label": int(item["answer"] == "true")}


def mbpp(path: Path) -> Iterator[Document]:
    """The test split of MBPP: task 11 to 510."""
    return (document for document in json_lines(path) if document["task_id"] in _MBPP_TEST)


def math(path: Path, subject: str) -> Iterator[Document]:
    """The problems of one of `MATH_SUBJECTS`, from a file that names the fields question and answer."""
    for item in json_lines(path):
        if item["type"] == MATH_SUBJECTS[subject]:
            yield {
                "problem": item["question"],
                "solution": item["answer"],
                "level": item["level"],
                "type": item["type"],
            }


def mmlu(path: Path, subject: str, split: str) -> Iterator[Document]:
    """One subject out of an archive of CSV files: question, choice0 to choice3, and the index of the answer."""
    rows = csv.DictReader(io.StringIO(_archive(path)[f"mmlu/{split}/{subject}_{split}.csv"]))
    for row in rows:
        yield {
            "question": row["question"],
            "choices": [row[f"choice{index}"] for index in range(4)],
            "answer": int(row["answer"]),
            "subject": subject,
        }


def mmlu_subjects(path: Path) -> list[str]:
    """The subjects that an archive for `mmlu` holds."""
    names = [Path(name).stem for name in _archive(path) if name.startswith("mmlu/test/")]
    return sorted(name.removesuffix("_test") for name in names)


def _archive(path: Path) -> dict[str, str]:
    key = (path, path.stat().st_mtime_ns)
    if key not in _ARCHIVES:
        with tarfile.open(path) as archive:
            members = [(member.name, archive.extractfile(member)) for member in archive if member.isfile()]
            texts = {name: file.read().decode("utf-8") for name, file in members if file is not None}
        _ARCHIVES.clear()
        _ARCHIVES[key] = texts
    return _ARCHIVES[key]


_ARCHIVES: dict[tuple[Path, int], dict[str, str]] = {}  # the last one read: it is asked for 57 subjects


def _text(path: Path) -> Any:
    # newline="\n": a "\r" inside a document of one line is a part of it.
    return _OPEN.get(path.suffix, open)(path, "rt", encoding="utf-8", newline="\n")


def _object(line: str, path: Path, number: int) -> Document:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number}: not JSON ({error.msg})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}, line {number}: a {type(found).__name__}; wanted a JSON object")
    return found


def _json_list(path: Path) -> list[Document]:
    with _text(path) as file:
        try:
            found = json.load(file)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(found, list):
        raise ValueError(f"{path}: a {type(found).__name__}; wanted a list of items")
    return found


def _between(text: Any, before: str, after: str, path: Path, number: int) -> str:
    if not isinstance(text, str) or not text.startswith(before) or after not in text:
        raise ValueError(f"{path}: item {number} has no instruction of the form {before!r} ... {after!r}")
    return text[len(before) : text.rindex(after)]


def _is_heading(line: str) -> bool:
    inner = line.strip()
    return inner.startswith("= ") and inner.endswith(" =") and len(inner) > 3


def _is_title(line: str) -> bool:
    """Of an article (" = Title = "), not of a section (" = = Section = = ")."""
    return _is_heading(line) and not line.strip().startswith("= =")


def _with_blank_lines(lines: list[str]) -> list[str]:
    """As WikiText sets its lines: a blank one before and after each heading, and one after each article."""
    spaced: list[str] = []
    for line in lines:
        if _is_title(line) and spaced:
            spaced.append(" ")
        spaced += [" ", line, " "] if _is_heading(line) else [line]
    return [*spaced, " "]
