"""Read a file of prompts: JSON lines, or plain text with one prompt a line."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import D5P4Error

NAMES = ("id", "prompt", "messages", "reference")


@dataclass(frozen=True)
class PromptLine:
    """One prompt of a file."""

    line: int  # counted from 1
    id: str | int | None
    prompt: str | list[dict[str, Any]]  # text, or chat messages
    reference: Any = None
    extra: dict[str, Any] = field(default_factory=dict)  # whatever else the line holds


def read_prompts(path: str | Path) -> list[PromptLine]:
    """The prompts of a file, in order. Blank lines are skipped.

    A `.txt` file has one prompt a line. Any other file has one JSON object a line: `prompt` (text) or `messages`
    (a conversation), and if wanted `id` (text or a whole number, unique in the file) and `reference`.
    """
    path = Path(path)
    numbered = [(i, line) for i, line in enumerate(_lines(path), start=1) if line.strip()]
    if not numbered:
        raise D5P4Error(f"{path} holds no prompt: every line is blank")
    if path.suffix.lower() == ".txt":
        return [PromptLine(i, None, line) for i, line in numbered]
    lines = [_parse(f"{path} line {i}", i, line) for i, line in numbered]
    first: dict[str | int, int] = {}
    for entry in lines:
        if entry.id is not None and first.setdefault(entry.id, entry.line) != entry.line:
            raise D5P4Error(f"{path} line {entry.line}: id {entry.id!r} was used before, in line {first[entry.id]}")
    return lines


def _lines(path: Path) -> list[str]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise D5P4Error(f"{path} does not exist") from None
    except IsADirectoryError:
        raise D5P4Error(f"{path} is a folder, not a file of prompts") from None
    except UnicodeDecodeError as reason:
        raise D5P4Error(f"{path} is not UTF-8 text: byte {reason.start} cannot be read") from None
    except OSError as reason:
        raise D5P4Error(f"{path} cannot be read: {reason.strerror or reason}") from None
    # Not splitlines: JSON text may hold U+2028 and its like.
    return [line.removesuffix("\r") for line in text.split("\n")]


def _parse(place: str, number: int, line: str) -> PromptLine:
    try:
        entry = json.loads(line)
        json.dumps(entry, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise D5P4Error(f"{place}: not valid text: it holds half a surrogate pair") from None
    except (ValueError, RecursionError) as reason:
        raise D5P4Error(f"{place}: not valid JSON: {reason}") from None
    if not isinstance(entry, dict):
        raise D5P4Error(f"{place}: expected a JSON object, found {_kind(entry)}")
    prompt, messages, name = (entry.get(key) for key in ("prompt", "messages", "id"))
    if prompt is not None and messages is not None:
        raise D5P4Error(f"{place}: has both 'prompt' and 'messages'; keep one")
    if prompt is None and messages is None:
        raise D5P4Error(f"{place}: has neither 'prompt' nor 'messages'")
    if prompt is not None and not isinstance(prompt, str):
        raise D5P4Error(f"{place}: 'prompt' must be text, not {_kind(prompt)}")
    if messages is not None:
        _check_messages(place, messages)
    if name is not None and (not isinstance(name, (str, int)) or isinstance(name, bool)):
        raise D5P4Error(f"{place}: 'id' must be text or a whole number, not {_kind(name)}")
    extra = {key: value for key, value in entry.items() if key not in NAMES}
    asked: Any = messages if prompt is None else prompt
    return PromptLine(number, name, asked, entry.get("reference"), extra)


def _check_messages(place: str, messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise D5P4Error(f"{place}: 'messages' must be a list of at least one message")
    for message in messages:
        parts = [message.get("role"), message.get("content")] if isinstance(message, dict) else [None]
        if not all(isinstance(part, str) for part in parts):
            raise D5P4Error(f"{place}: a message must be an object with 'role' and 'content' as text")


def _kind(value: Any) -> str:
    """What JSON calls the type of a value."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
