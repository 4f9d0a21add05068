"""Build the corpus and the tokenizer that are shipped in src/depthroute/data/embedded.

    python scripts/make_embedded_corpus.py BOOKS.jsonl.xz [BOOKS.jsonl.xz ...]

Each input line is one whole book, {"id", "text"}, with paragraphs separated by a blank line. The books below are
picked by id, trimmed to their own text, and cut into documents at chapter marks and paragraph boundaries. Two runs on
the same inputs give the same bytes (with the same versions of liblzma and tokenizers).
"""

import argparse
import hashlib
import json
import lzma
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

EMBEDDED = Path(__file__).parents[1] / "src" / "depthroute" / "data" / "embedded"
END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 2048
LONGEST_DOCUMENT = 20_000  # characters: about 3,500 words
SHORTEST_DOCUMENT = 2_000

NUMERAL = r"[IVXLC]+"
NOTHING = r"(?!)"
STRAIGHT_QUOTES = {0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"'}


@dataclass(frozen=True)
class Book:
    """One book of the corpus, and how to find its own text inside its file."""

    key: str
    author: str
    title: str
    source_id: str
    heading: str  # a (clean) paragraph that starts a chapter
    first: str | None = None  # the first paragraph to keep starts with this
    end: str | None = None  # the first paragraph to leave out again starts with this
    drop: str = NOTHING  # paragraphs to leave out: title pages in the middle, marks of the edition
    held_out: bool = False
    note: str = "whole"


BOOKS = (
    Book(
        key="austen-sense-and-sensibility",
        author="Jane Austen",
        title="Sense and Sensibility",
        source_id="gutenberg/Austen, Jane/Sense and Sensibility",
        heading=r"CHAPTER \d+",
        drop=r"\[At this point in the first and second editions",
    ),
    Book(
        key="doyle-adventures-of-sherlock-holmes",
        author="Arthur Conan Doyle",
        title="The Adventures of Sherlock Holmes",
        source_id="gutenberg/Doyle, Arthur Conan/The Adventures of Sherlock Holmes",
        heading=NUMERAL + r"\. [A-Z' -]+",
    ),
    Book(
        key="swift-gullivers-travels",
        author="Jonathan Swift",
        title="Gulliver's Travels",
        source_id="gutenberg/Swift, Jonathan/Gulliver's Travels into Several Remote Nations of the World",
        heading=r"PART " + NUMERAL + r"\. .*|CHAPTER " + NUMERAL + r"\.",
        first="PART I. A VOYAGE TO LILLIPUT.",
        drop=r"\[Picture",
        note="the four voyages, without the prefatory letters",
    ),
    Book(
        key="shelley-frankenstein",
        author="Mary Wollstonecraft Shelley",
        title="Frankenstein; Or, The Modern Prometheus",
        source_id="gutenberg/Shelley, Mary Wollstonecraft/Frankenstein; Or, The Modern Prometheus",
        heading=r"(LETTER|CHAPTER) " + NUMERAL + r"\.",
        drop=r"FRANKENSTEIN;|OR,|(THE )?MODERN PROMETHEUS|END OF VOL|IN THREE VOLUMES|London:|PRINTED FOR"
        r"|Did I request thee, Maker|Paradise Lost",
    ),
    Book(
        key="darwin-origin-of-species",
        author="Charles Darwin",
        title="On the Origin of Species (first edition)",
        source_id="gutenberg/Darwin, Charles/On the Origin of Species By Means of Natural Selection\r"
        "Or, the Preservation of Favoured Races in the Struggle for Life",
        heading=r"\d+\. [A-Z ]+\.|NATURAL SELECTION\.",
        first="When on board H.M.S.",
        end="8. HYBRIDISM.",
        note="the introduction and chapters 1 to 7",
    ),
    Book(
        key="james-washington-square",
        author="Henry James",
        title="Washington Square",
        source_id="gutenberg/James, Henry/Washington Square",
        heading=NUMERAL,
    ),
    Book(
        key="chesterton-orthodoxy",
        author="G. K. Chesterton",
        title="Orthodoxy",
        source_id="gutenberg/Chesterton, G. K. (Gilbert Keith)/Orthodoxy",
        heading=r"CHAPTER " + NUMERAL + r"\.?—.*",
    ),
    Book(
        key="wells-war-of-the-worlds",
        author="H. G. Wells",
        title="The War of the Worlds",
        source_id="gutenberg/Wells, H. G. (Herbert George)/The War of the Worlds",
        heading=r"BOOK (ONE|TWO)|" + NUMERAL + r"\.",
        drop=r"BOOK (ONE|TWO)\.—|I\. THE EVE OF THE WAR II\.|I\. UNDER FOOT",
    ),
    Book(
        key="russell-problems-of-philosophy",
        author="Bertrand Russell",
        title="The Problems of Philosophy",
        source_id="gutenberg/Russell, Bertrand/The Problems of Philosophy",
        heading=r"CHAPTER " + NUMERAL + r"\. .*",
        end="BIBLIOGRAPHICAL NOTE",
    ),
    Book(
        key="carroll-through-the-looking-glass",
        author="Lewis Carroll",
        title="Through the Looking-Glass",
        source_id="gutenberg/Carroll, Lewis/Through the Looking-Glass",
        heading=r"CHAPTER " + NUMERAL + r"\. .*",
        drop=r"YKCOWREBBAJ|sevot yhtils",
    ),
    Book(
        key="stevenson-jekyll-and-hyde",
        author="Robert Louis Stevenson",
        title="The Strange Case of Dr. Jekyll and Mr. Hyde",
        source_id="gutenberg/Stevenson, Robert Louis/The Strange Case of Dr. Jekyll and Mr. Hyde",
        heading=r"(STORY OF|SEARCH FOR|DR\. JEKYLL WAS|THE CAREW|INCIDENT|THE LAST|DR\. LANYON'S|HENRY JEKYLL'S) ?.*",
        held_out=True,
    ),
    Book(
        key="thoreau-canoeing-in-the-wilderness",
        author="Henry David Thoreau",
        title="Canoeing in the Wilderness",
        source_id="gutenberg/Thoreau, Henry David/Canoeing in the wilderness",
        heading=NUMERAL,
        first="I started on my third excursion",
        end="THE END",
        drop=r"\(The figure of a bear|niasoseb",
        held_out=True,
        note="without the editor's introduction",
    ),
)


def read_books(paths: Iterable[Path]) -> dict[str, str]:
    """The text of every wanted book, by its id in the input files."""
    wanted = {book.source_id for book in BOOKS}
    found: dict[str, str] = {}
    for path in paths:
        with lzma.open(path, "rt", encoding="utf-8") as lines:
            for record in map(json.loads, lines):
                if record["id"] in wanted:
                    found[record["id"]] = record["text"]
    if missing := sorted(wanted - found.keys()):
        raise SystemExit("not in the input files: " + "; ".join(missing))
    return found


def paragraphs(book: Book, text: str) -> list[str]:
    """The paragraphs of the book itself, clean: no contents, notes, index or marks of the edition."""
    kept = text.split("\n\n")
    start = 0 if book.first is None else next(i for i, p in enumerate(kept) if p.startswith(book.first))
    stop = len(kept) if book.end is None else next(i for i, p in enumerate(kept) if p.startswith(book.end))
    heading, drop = re.compile(book.heading), re.compile(book.drop)
    result, in_footnotes = [], False
    for paragraph in map(clean, kept[start:stop]):
        if heading.fullmatch(paragraph):
            in_footnotes = False
        elif paragraph == "FOOTNOTES:":
            in_footnotes = True
        if not in_footnotes and not drop.match(paragraph):
            result.append(paragraph)
    return result


def clean(paragraph: str) -> str:
    """Straight quotes, single spaces, no note marks; prose that was left hard-wrapped becomes one line."""
    paragraph = paragraph.translate(STRAIGHT_QUOTES)
    paragraph = re.sub(r" ?\{\d+[a-z]?\}", "", paragraph)
    paragraph = re.sub(r" {2,}", " ", paragraph)
    lines = paragraph.split("\n")
    wrapped = len(lines) > 1 and all(len(line) > 38 for line in lines[:-1])
    return " ".join(lines) if wrapped else paragraph


def chapters(book: Book, text: str) -> list[list[str]]:
    """Paragraphs by chapter. What is too short to be a document (a title, a last page) joins its neighbour."""
    heading = re.compile(book.heading)
    result: list[list[str]] = [[]]
    for paragraph in paragraphs(book, text):
        if heading.fullmatch(paragraph) and length(result[-1]) > SHORTEST_DOCUMENT:
            result.append([])
        result[-1].append(paragraph)
    if len(result) > 1 and length(result[-1]) < SHORTEST_DOCUMENT:
        result[-2:] = [result[-2] + result[-1]]
    return result


def pieces(chapter: list[str]) -> Iterator[list[str]]:
    """A chapter as one document, or as nearly equal ones where it is long, cut between paragraphs."""
    total = length(chapter)
    count = -(-total // LONGEST_DOCUMENT)
    piece: list[str] = []
    done, emitted = 0, 0
    for paragraph in chapter:
        piece.append(paragraph)
        done += length([paragraph])
        if done >= total * (emitted + 1) / count:
            yield piece
            piece, emitted = [], emitted + 1


def length(of: list[str]) -> int:
    return sum(len(paragraph) + 2 for paragraph in of)


def documents(book: Book, text: str) -> list[dict[str, str]]:
    """The book as records {"id", "book", "author", "text"}, in reading order."""
    texts = ["\n\n".join(piece) for chapter in chapters(book, text) for piece in pieces(chapter)]
    return [
        {"id": f"{book.key}/{number:03d}", "book": book.title, "author": book.author, "text": text}
        for number, text in enumerate(texts, start=1)
    ]


def write_xz(path: Path, records: list[dict[str, str]]) -> None:
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    path.write_bytes(lzma.compress(lines.encode("utf-8"), preset=9 | lzma.PRESET_EXTREME))


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE of VOCAB_SIZE tokens: any text can be encoded, and decodes to itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """The two files from which Hugging Face's PreTrainedTokenizerFast loads the tokenizer."""
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


SOURCES = """\
# The embedded corpus

English prose in the public domain, so that the quickstart needs no network. Written by
`scripts/make_embedded_corpus.py`.

The books come from Project Gutenberg, by way of the GitHub repository rcdm-uga/Gutenberg_Text at commit a0b16d35a985
("top 100 authors"), with everything that names Project Gutenberg, page and illustration marks and transcribers' notes
removed and hard-wrapped lines joined. They are in the public domain in the USA; elsewhere the law of the place decides.

How they were cut: contents, footnotes, indexes and title pages are left out and curly quotes are made straight. Each
book is cut at its chapter marks; a chapter (or, where the marks are missing, a run of paragraphs) of more than
{longest:,} characters becomes nearly equal documents, cut between paragraphs. The documents of `train.jsonl.xz` are
shuffled by the hash of their id, so that a part of the stream is a sample of all books. The books of
`validation.jsonl.xz` are held out whole, and their authors wrote no book of the train part.

| book | author | part | documents | characters |
|---|---|---|---|---|
{rows}
| **train** | | | {train_documents} | {train_characters:,} |
| **validation** | | | {validation_documents} | {validation_characters:,} |

Each line of a file is `{{"id", "book", "author", "text"}}`.

`tokenizer/` holds a byte-level BPE of {vocab_size:,} tokens, the end-of-text token `{end_of_text}` among them, trained
on the train part alone.
"""


def describe(books: dict[str, list[dict[str, str]]], train: list, validation: list) -> str:
    rows = []
    for book in BOOKS:
        part = "validation" if book.held_out else "train"
        records = books[book.key]
        title = book.title if book.note == "whole" else f"{book.title}: {book.note}"
        rows.append(f"| {title} | {book.author} | {part} | {len(records)} | {characters(records):,} |")
    return SOURCES.format(
        longest=LONGEST_DOCUMENT,
        rows="\n".join(rows),
        train_documents=len(train),
        train_characters=characters(train),
        validation_documents=len(validation),
        validation_characters=characters(validation),
        vocab_size=VOCAB_SIZE,
        end_of_text=END_OF_TEXT,
    )


def characters(records: list[dict[str, str]]) -> int:
    return sum(len(record["text"]) for record in records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("books", nargs="+", type=Path, help="xz-compressed JSON lines, one book a line")
    parser.add_argument("--out", type=Path, default=EMBEDDED, help="folder to write to (default: the package's)")
    arguments = parser.parse_args()

    texts = read_books(arguments.books)
    books = {book.key: documents(book, texts[book.source_id]) for book in BOOKS}
    train = [record for book in BOOKS if not book.held_out for record in books[book.key]]
    train.sort(key=lambda record: hashlib.sha256(record["id"].encode()).digest())
    validation = [record for book in BOOKS if book.held_out for record in books[book.key]]

    arguments.out.mkdir(parents=True, exist_ok=True)
    write_xz(arguments.out / "train.jsonl.xz", train)
    write_xz(arguments.out / "validation.jsonl.xz", validation)
    write_tokenizer(arguments.out / "tokenizer", train_tokenizer(record["text"] for record in train))
    description = describe(books, train, validation)
    (arguments.out / "SOURCES.md").write_text(description, encoding="utf-8")
    print(description)


if __name__ == "__main__":
    main()
