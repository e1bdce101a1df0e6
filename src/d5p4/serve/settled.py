"""The part of an answer that can no longer change, while the rest is still being decoded.

A revealed token stays. So the tokens before the first mask are final when every row that can still win has them: with
one answer per prompt, the winner descends from a row of the next pool. Their text is final up to a character that is
not complete, and up to what may be the beginning of a stop.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..prompts import Request
from ..types import Model
from ..view.pieces import piece


def settled_text(model: Model, request: Request, rows: Sequence[Sequence[int]], stops: Sequence[str]) -> str:
    """A beginning of the final text. `rows` are the window's tokens in every row that can still win."""
    window = request.window(model.mask_id)
    ids, infills = request.ids + [model.mask_id] * request.append, request.append < len(window)
    for position, tokens in zip(window, zip(*rows, strict=True), strict=True):
        ids[position] = tokens[0] if len(set(tokens)) == 1 else model.mask_id
    ends = [i for i in range(len(request.ids), len(ids)) if ids[i] in model.eos_ids]
    masks = [i for i in window if ids[i] == model.mask_id]
    ids = ids[0 if infills else len(request.ids) : min([*ends, *masks, len(ids)])]
    while ids and _unfinished(model, ids[-1]):
        ids.pop()
    text = " ".join(map(str, ids)) if model.tokenizer is None else model.tokenizer.decode(ids)
    return before_stop(text.rstrip("\ufffd"), stops)


def _unfinished(model: Model, token: int) -> bool:
    """Whether the next tokens may change the text of this one: it is a byte, or a part of a character."""
    backend = getattr(model.tokenizer, "backend", None)
    name = backend.id_to_token(token) if backend is not None else None
    return isinstance(piece(model, token), list) or (name or "").startswith("<0x")


def before_stop(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop, or before an end that may grow into one."""
    ends = [i for stop in stops for i in range(len(text)) if stop.startswith(text[i : i + len(stop)])]
    return text[: min(ends, default=len(text))]


def cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """A final text before its first stop, and whether there was one."""
    ends = [text.index(stop) for stop in stops if stop in text]
    return text[: min(ends, default=len(text))], bool(ends)
