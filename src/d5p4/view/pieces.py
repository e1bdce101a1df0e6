"""The text of single tokens, so that a page can show a row token by token."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from ..types import Model

Piece = str | list[int]
"""Text, or the bytes of a token that holds only a part of a character."""

BLOCK = "░"  # a masked token in plain text
_KNOWN: WeakKeyDictionary[Model, dict[int, Piece]] = WeakKeyDictionary()
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_letters() -> dict[str, int]:
    """Which byte each letter of a byte-level vocabulary stands for: printable ones themselves, then 256 and on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_LETTERS = _byte_letters()


def piece(model: Model, token: int) -> Piece:
    """The text of one token inside a row; special tokens have none, as in `Result.texts`."""
    known = _KNOWN.setdefault(model, {})
    if token not in known:
        known[token] = _read(model.tokenizer, token)
    return known[token]


def _read(codec: Any, token: int) -> Piece:
    if codec is None:
        return f"{token} "
    alone = codec.decode([token])
    if "\ufffd" in alone and (part := _bytes(codec, token)):
        return part
    twice = codec.decode([token, token])  # some decoders drop the space before the first word
    return twice[len(alone) :] if twice.startswith(alone) else alone


def _bytes(codec: Any, token: int) -> list[int] | None:
    backend = getattr(codec, "backend", None)
    text = backend.id_to_token(token) if backend is not None else None
    if not text:
        return None
    if found := _BYTE.fullmatch(text):
        return [int(found[1], 16)]
    return [_LETTERS[letter] for letter in text] if all(letter in _LETTERS for letter in text) else None


def spell(pieces: Iterable[Piece | None]) -> list[str | None]:
    """Text for each piece; a character spread over several tokens appears with its last one. None (masks) stays."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts: list[str | None] = []
    for part in pieces:
        if isinstance(part, list):
            texts.append(decoder.decode(bytes(part)))
            continue
        unfinished = decoder.decode(b"", final=True)
        decoder.reset()
        if unfinished and texts:
            texts[-1] = f"{texts[-1] or ''}{unfinished}"
        texts.append(part)
    unfinished = decoder.decode(b"", final=True)
    if unfinished and texts:
        texts[-1] = f"{texts[-1] or ''}{unfinished}"
    return texts


class Pieces:
    """The tokens that occur in a trace, numbered as they come."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._number: dict[int, int] = {}
        self.texts: list[Piece] = []

    def index(self, token: int) -> int:
        if token not in self._number:
            self._number[token] = len(self.texts)
            self.texts.append(piece(self.model, token))
        return self._number[token]

    def ends(self) -> list[int]:
        """The numbers of end-of-text tokens."""
        return [self._number[token] for token in self.model.eos_ids if token in self._number]
