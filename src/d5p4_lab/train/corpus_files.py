"""Cleans the texts of books, and reads the folders that `python -m d5p4_lab train corpus` makes.

`normalise` removes characters that have no meaning but would cost tokens. Line ends become `\\n`. Byte order marks,
zero-width spaces, word joiners, spaces at the end of a line and blank lines around a book are removed. Nothing else
changes: every line is already a paragraph, so no lines are joined, and quotes and dashes stay as they are.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from d5p4.errors import D5P4Error

END_TEXT = "<|endoftext|>"
_INVISIBLE = re.compile("[\u200b\u2060\ufeff]")
_LINE_END = re.compile(r"[ \t]*(?:\r\n|\r|\n)")


class Corpus(NamedTuple):
    """The books as tokens, with `END_TEXT` between two books. The byte counts do not include these separators."""

    train: np.ndarray  # uint16 [n], memory-mapped
    val: np.ndarray  # uint16 [m], memory-mapped
    val_bytes: int
    train_bytes: int
    tokenizer: Tokenizer
    left_out: int = 0  # the number of held-out books that were left out, because the training text has them

    @property
    def size(self) -> str:
        """A sentence with the sizes of the corpus. A continued run must find the same sentence in its saved state."""
        train = f"{self.train_bytes:,} bytes of text in {len(self.train):,} tokens"
        return f"{train}; {self.val_bytes:,} bytes of text in {len(self.val):,} tokens are held out."


def load(out: Path) -> Corpus:
    """Return the corpus that `python -m d5p4_lab train corpus` wrote to `out`."""
    if (stored_corpus := stored(Path(out))) is None:
        raise D5P4Error(f"{out} holds no complete corpus (tokenizer.json, train.npy, val.npy, corpus.json)")
    return stored_corpus[0]


def normalise(book: str) -> str:
    """Return the cleaned text of a book. The docstring of this module lists the changes."""
    lines = _LINE_END.sub("\n", _INVISIBLE.sub("", book) + "\n").split("\n")
    filled = [i for i, line in enumerate(lines) if line.strip()]
    return "\n".join(lines[filled[0] : filled[-1] + 1]) if filled else ""


def stored(out: Path) -> tuple[Corpus, dict[str, Any]] | None:
    """Return the corpus in `out` and the content of corpus.json. Return None if a file is missing or incomplete."""
    try:
        description = json.loads((out / "corpus.json").read_bytes())
        train, val = (np.load(out / f"{name}.npy", mmap_mode="r") for name in ("train", "val"))
        tokenizer = read_tokenizer(out / "tokenizer.json")
    except (OSError, ValueError):  # includes D5P4Error, which is a ValueError
        return None
    if (len(train), len(val)) != (description["train"]["tokens"], description["val"]["tokens"]):
        return None
    bytes_of = {name: description[name]["bytes"] for name in ("train", "val")}
    left_out = description["val"].get("left_out", 0)
    return Corpus(train, val, bytes_of["val"], bytes_of["train"], tokenizer, left_out), description


def read_tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the package tokenizers raises plain Exceptions
        raise D5P4Error(f"{path} cannot be read as a tokenizer: {error}") from error
