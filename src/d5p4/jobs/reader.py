"""Read a file of prompts: JSON lines, or plain text with one prompt a line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import D5P4Error
from ..record import finite
from ..rng import key_of

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class PromptLine:
    """One prompt of a file."""

    line: int  # counted from 1
    id: str | int | None
    prompt: str | list[dict[str, Any]]  # text, or chat messages
    fields: dict[str, Any] = field(default_factory=dict)  # all that the line holds


@dataclass(frozen=True)
class BadLine:
    """A line that holds no prompt that can be decoded."""

    line: int
    error: str
    fields: dict[str, Any] = field(default_factory=dict)  # all that the line holds, where that can be read


class PromptFile:
    """A file of prompts, read once to count and hash it and again, line by line, as often as asked.

    A `.txt` file has one prompt a line. Any other file has one JSON object a line: `prompt` (text) or `messages`
    (a conversation), and if wanted `id` (text or a whole number, unique in the file) and anything else.
    Blank lines are skipped.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.text = self.path.suffix.lower() == ".txt"
        self.count = self.last = 0  # lines that are not blank, and the number of the last of them
        self._stamp = self._stamped()
        digest = hashlib.sha256()
        for number, raw in self._raw():
            digest.update(raw)
            if raw.strip():
                self.count, self.last = self.count + 1, number
        self.digest = digest.hexdigest()
        if not self.count:
            raise D5P4Error(f"{self.path} holds no prompt: every line is blank")

    def __iter__(self) -> Iterator[PromptLine | BadLine]:
        """Every line that is not blank, in order."""
        first: dict[int, int] = {}  # line by the key an id gives
        for number, raw in self._raw():
            if not raw.strip():
                continue
            found = self._parse(number, raw.removeprefix(BYTE_ORDER_MARK) if number == 1 else raw)
            if isinstance(found, PromptLine) and found.id is not None:
                before = first.setdefault(key_of(found.id), number)
                if before != number:
                    found = BadLine(number, f"id {found.id!r} was used before, in line {before}", found.fields)
            yield found

    def check_unchanged(self) -> None:
        """Raise where the file was written to since it was counted: what was read since may be another's."""
        if self._stamped() != self._stamp:
            raise D5P4Error(
                f"{self.path} was changed while it was being decoded; bring it back as it was and run the same command "
                "again"
            )

    def _stamped(self) -> tuple[int, ...] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None  # reading it has more to say
        return found.st_size, found.st_mtime_ns, found.st_ino

    def _raw(self) -> Iterator[tuple[int, bytes]]:
        try:
            with self.path.open("rb") as file:
                yield from enumerate(file, start=1)
        except FileNotFoundError:
            raise D5P4Error(f"{self.path} does not exist") from None
        except IsADirectoryError:
            raise D5P4Error(f"{self.path} is a folder, not a file of prompts") from None
        except OSError as reason:
            raise D5P4Error(f"{self.path} cannot be read: {reason.strerror or reason}") from None

    def _parse(self, number: int, raw: bytes) -> PromptLine | BadLine:
        fields: dict[str, Any] = {}
        try:
            line = _text(raw)
            if self.text:
                return PromptLine(number, None, line, {"prompt": line})
            fields = _object(line)
            return PromptLine(number, *_asked(fields), fields)
        except D5P4Error as reason:
            return BadLine(number, str(reason), fields)


def read_prompts(path: str | Path) -> list[PromptLine]:
    """The prompts of a file (see `PromptFile`), in order; the first bad line is an error."""
    lines = []
    for found in PromptFile(path):
        if isinstance(found, BadLine):
            raise D5P4Error(f"{path} line {found.line}: {found.error}")
        lines.append(found)
    return lines


def _text(raw: bytes) -> str:
    try:
        return raw.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as reason:
        raise D5P4Error(f"not UTF-8 text: byte {reason.start} of the line cannot be read") from None


def _object(line: str) -> dict[str, Any]:
    try:
        entry = finite(json.loads(line))
        json.dumps(entry, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise D5P4Error("not valid text: it holds half a surrogate pair") from None
    except (ValueError, RecursionError) as reason:
        raise D5P4Error(f"not valid JSON: {reason}") from None
    if not isinstance(entry, dict):
        raise D5P4Error(f"expected a JSON object, found {_kind(entry)}")
    return entry


def _asked(entry: dict[str, Any]) -> tuple[str | int | None, Any]:
    """The id and the prompt of a line."""
    prompt, messages, name = (entry.get(key) for key in ("prompt", "messages", "id"))
    if prompt is not None and messages is not None:
        raise D5P4Error("has both 'prompt' and 'messages'; keep one")
    if prompt is None and messages is None:
        raise D5P4Error("has neither 'prompt' nor 'messages'")
    if prompt is not None and not isinstance(prompt, str):
        raise D5P4Error(f"'prompt' must be text, not {_kind(prompt)}")
    if messages is not None:
        _check_messages(messages)
    if name is not None and (not isinstance(name, (str, int)) or isinstance(name, bool)):
        raise D5P4Error(f"'id' must be text or a whole number, not {_kind(name)}")
    return name, messages if prompt is None else prompt


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise D5P4Error("'messages' must be a list of at least one message")
    for message in messages:
        parts = [message.get("role"), message.get("content")] if isinstance(message, dict) else [None]
        if not all(isinstance(part, str) for part in parts):
            raise D5P4Error("a message must be an object with 'role' and 'content' as text")


def _kind(value: Any) -> str:
    """What JSON calls the type of a value."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
