"""Open-ended text: pieces of documents to compare with, and paragraphs to be continued.

A file holds documents separated by a line `<|endoftext|>`, one paragraph per line, or one document in the `text` of
each JSON or parquet record. A folder that `python -m d5p4_lab train corpus` has made holds them as tokens; only such a
folder leaves out the held-out books that are also in the training text, perhaps in another edition.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TypeVar

import numpy as np

from ...errors import D5P4Error
from .corpus import END_TEXT, load, normalise
from .files import RECORDS, TEXTS, locate, read_records, read_text, suffix
from .task import Example, shuffled

PIECE = 200  # words of a piece
PARAGRAPH, LONGER = 60, 140  # words of a paragraph to be continued: at least, and so many more at most
PROMPT = (8, 40)  # words of what is given: at least (else a second sentence is taken), at most
CONTINUATION = 30  # words of what is to be written, at least

_STOP = re.compile(
    r"(?<![.!?\u2026])[.!?\u2026]+[\"'\u201d\u2019)\]*_]*(?P<gap>\s+)[\"'\u201c\u2018(\[*_]*(?P<next>\w)"
)
_SHORT = "Mr Mrs Ms Messrs Mme Mlle Dr St Rev Hon Prof Capt Col Gen Lt Lieut Sgt Maj Gov Sen Jr Sr Esq Vol Chap vs viz"
_ABBREVIATION = re.compile(rf"\b(?:{'|'.join(_SHORT.split())}|[A-HJ-Z])\.$")

T = TypeVar("T")


def sentences(text: str) -> list[str]:
    """The sentences of a paragraph, without the space between them.

    A simple rule. One ends at `.`, `!`, `?` or `…`, with the closing quotes and brackets after it, where white space
    and a capital letter follow (opening quotes may come first); not after a title such as `Mr.` or `St.`, nor after an
    initial, which is any capital letter but I. So a speech that ends in `!"` before a name is cut from its `said`.
    """
    found, start = [], 0
    for stop in _STOP.finditer(text):
        end_of_word = text[max(start, stop.start() - 8) : stop.start() + 1]  # longer than any abbreviation
        if stop["next"].isupper() and not _ABBREVIATION.search(end_of_word):
            found.append(text[start : stop.start("gap")])
            start = stop.end("gap")
    return [*found, text[start:]] if text[start:].strip() else found


def continuation(paragraph: str, words: int = PARAGRAPH) -> tuple[str, str] | None:
    """A paragraph as its beginning and the rest; None where it does not lend itself.

    It has `words` to `words + 140` words. The beginning is the first sentence, with the second when the first has less
    than 8 words; it must have 8 to 40 words, and leave 30 or more.
    """
    paragraph = paragraph.strip()
    if not words <= len(paragraph.split()) <= words + LONGER:
        return None
    cut = 0
    for sentence in sentences(paragraph)[:2]:
        cut = paragraph.index(sentence, cut) + len(sentence)
        if len(paragraph[:cut].split()) >= PROMPT[0]:
            break
    prompt, rest = paragraph[:cut], paragraph[cut:].lstrip()
    if not PROMPT[0] <= len(prompt.split()) <= PROMPT[1] or len(rest.split()) < CONTINUATION:
        return None
    return prompt, rest


def pieces(document: str, words: int = PIECE) -> list[str]:
    """A document in pieces of exactly `words` words, white space kept; the rest goes, but a shorter document stays."""
    places = [match.span() for match in re.finditer(r"\S+", document)]
    ends = range(words, len(places) + 1, words) if len(places) >= words else [len(places)] if places else []
    return [document[places[max(0, end - words)][0] : places[end - 1][1]] for end in ends]


def piece_examples(documents: Sequence[str], words: int, seed: int) -> list[Example]:
    """Nothing given, one piece as reference."""
    return _spread(
        [
            [
                Example(f"{d}.{p}", None, (piece,), None, {"document": d, "piece": p})
                for p, piece in enumerate(pieces(document, words))
            ]
            for d, document in enumerate(documents)
        ],
        seed,
    )


def continuation_examples(books: Sequence[str], words: int, seed: int) -> list[Example]:
    """The beginning of a paragraph given, the rest of it as reference."""
    return _spread(
        [
            [
                Example(f"{b}.{p}", found[0], (found[1],), None, {"book": b, "paragraph": p})
                for p, paragraph in enumerate(book.split("\n"))
                if (found := continuation(paragraph, words)) is not None
            ]
            for b, book in enumerate(books)
        ],
        seed,
    )


def read_documents(path: str | Path, split: str | None) -> list[str]:
    """The documents of a file, a folder or a prepared corpus; of a folder the held-out ones unless `split` tells."""
    folder = Path(path).expanduser()
    if (folder / "corpus.json").is_file():
        found = list(_prepared(folder, split))
    else:
        files = locate(path, split=split, default="validation", folders=("data",), suffixes=TEXTS)
        found = [document for file in files for document in _documents(file)]
    if not found:
        raise D5P4Error(f"{path} holds no text")
    return found


def _documents(file: Path) -> Iterator[str]:
    if suffix(file) in RECORDS:
        texts = [record.get("text") for record in read_records(file, columns=["text"])]
        wrong = next((i for i, text in enumerate(texts, 1) if not isinstance(text, str)), None)
        if wrong is not None:
            raise D5P4Error(f"{file} record {wrong} has no 'text'")
    else:
        texts = re.split(rf"^[^\S\n]*{re.escape(END_TEXT)}[^\S\n]*$", read_text(file), flags=re.MULTILINE)
    yield from filter(None, (normalise(text) for text in texts if text is not None))


def _prepared(folder: Path, split: str | None) -> Iterator[str]:
    corpus = load(folder)
    if split not in (None, "train", "val", "validation"):
        raise D5P4Error(f"split={split!r}: the corpus in {folder} has train and val")
    tokens = corpus.train if split == "train" else corpus.val
    ends = np.flatnonzero(tokens == corpus.tokenizer.token_to_id(END_TEXT))
    for start, stop in zip([0, *(ends + 1)], [*ends, len(tokens)], strict=True):
        yield corpus.tokenizer.decode(tokens[start:stop].tolist(), skip_special_tokens=False)


def _spread(groups: Sequence[Sequence[T]], seed: int) -> list[T]:
    """All items so that any beginning of the list holds as many of each group as can be.

    Groups take turns; the order of the groups and of the items of each comes from the seed.
    """
    order = [groups[i] for i in shuffled(len(groups), seed, "groups")]
    rows = [[group[i] for i in shuffled(len(group), seed, "items")] for group in order]
    return [item for turn in zip_longest(*rows) for item in turn if item is not None]
