"""Pieces are the texts of single tokens. The page uses pieces to show rows and drafts of answers token by token."""

import codecs
import re
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from tokenizers.pre_tokenizers import ByteLevel

from ..ops.precision import wide
from ..result import finite
from ..types import Model, Snapshot

Piece = str | list[int]
"""The text of a token, or its bytes if the token holds only a part of a character."""

BLOCK = "░"  # stands for a masked token in plain text
MOST_DRAFTS = 16  # at most this many drafts are shown per prompt
_KNOWN: WeakKeyDictionary[Model, dict[int, Piece]] = WeakKeyDictionary()
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
# A byte-level vocabulary writes each byte as a letter. A printable byte is the character with the same number; the
# letters from 256 upwards are the other bytes, in order.
_ALPHABET = sorted(ByteLevel.alphabet())
_PRINTABLE = [ord(letter) for letter in _ALPHABET if ord(letter) < 256]
_LETTERS = dict(zip(_ALPHABET, _PRINTABLE + sorted({*range(256)} - {*_PRINTABLE}), strict=True))


def piece(model: Model, token: int) -> Piece:
    """Return the text of one token inside a row. Special tokens have an empty text, as in `Result.texts`."""
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
    twice = codec.decode([token, token])  # the second copy keeps the leading space that some decoders drop
    return twice[len(alone) :] if twice.startswith(alone) else alone


def token_name(codec: Any, token: int) -> str | None:
    backend = getattr(codec, "backend", None)
    return None if backend is None else backend.id_to_token(token)


def _bytes(codec: Any, token: int) -> list[int] | None:
    text = token_name(codec, token)
    if not text:
        return None
    if byte := _BYTE.fullmatch(text):
        return [int(byte[1], 16)]
    return [_LETTERS[letter] for letter in text] if all(letter in _LETTERS for letter in text) else None


def spell(pieces: Iterable[Piece | None]) -> list[str | None]:
    """Return the text of each piece. A character made of several tokens is in the text of its last token."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts: list[str | None] = []
    for part in (*pieces, ""):  # the empty piece ends an unfinished character
        if isinstance(part, list):
            texts.append(decoder.decode(bytes(part)))
            continue
        unfinished = decoder.decode(b"", final=True)
        decoder.reset()
        if unfinished and texts:
            texts[-1] = f"{texts[-1] or ''}{unfinished}"
        texts.append(part)
    return texts[:-1]


def drafts(model: Model, shot: Snapshot, place: int, holes: int = 0) -> list[dict[str, Any]]:
    """Return one draft, {"text", "tokens", "logprobs"}, of the first child of each chosen parent, or of each row of a
    tree that is awake. A masked token has None in "tokens" and in "logprobs".

    A draft ends before its first end-of-text token, which has no meaning in the first `holes` positions. `place` is
    the prompt's row in the tensors of the snapshot.
    """
    every = slice(None, None, shot.choice.children) if shot.next_awake is None else shot.next_awake[place]
    length, both = shot.length(place), (shot.next_tokens, shot.next_logprobs)
    tokens, logprobs = (x[place, every][:MOST_DRAFTS, :length] for x in both)
    rows = torch.stack([x.to(wide(x.device)) for x in (tokens, logprobs)]).tolist()  # a single transfer
    return [_draft(model, list(map(int, row)), chances, holes) for row, chances in zip(*rows, strict=True)]


def _draft(model: Model, row: list[int], chances: list[float], holes: int) -> dict[str, Any]:
    end = next((i for i in range(holes, len(row)) if row[i] in model.eos_ids), len(row))
    masked = [token == model.mask_id for token in row[:end]]
    texts = spell(None if hidden else piece(model, token) for token, hidden in zip(row, masked, strict=False))
    shown = [None if hidden else finite(round(chance, 4)) for hidden, chance in zip(masked, chances, strict=False)]
    return {"text": "".join(BLOCK if text is None else text for text in texts), "tokens": texts, "logprobs": shown}
