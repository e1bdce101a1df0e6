"""Read a file of prompts, which is JSON lines or plain text with one prompt per line."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import D5P4Error
from ..prompts import Request
from ..result import finite
from ..rng import key_of

HALF_PAIR = "not valid text: it holds half a surrogate pair"


@dataclass(frozen=True)
class PromptLine:
    """A line of a file of prompts. It has an `error` if it has no prompt that can be decoded."""

    line: int  # counted from 1
    id: str | int | None = None
    prompt: str | list[dict[str, Any]] = ""  # text, or chat messages
    fields: dict[str, Any] = field(default_factory=dict)  # all fields of the line, if the line can be read
    error: str = ""
    request: Request | None = None  # what is decoded, once `plan_work` has prepared the prompt

    @property
    def name(self) -> str:
        return f"line {self.line}"


class PromptFile:
    """A file of prompts. The constructor reads the file to count and hash its lines. Each iteration reads it again.

    A `.txt` file has one prompt per line. Any other file has one JSON object per line. The object has the field
    `prompt` (text) or `messages` (a conversation). It may have `id` (text or a whole number, unique in the file) and
    any other fields. Blank lines are skipped. There are `count` other lines, and `last` is the number of the last.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.text = self.path.suffix.lower() == ".txt"
        self._has_prompt = bytearray(1)  # for each line number, whether the line is not blank
        self._stamp = self._current_stamp()
        digest = hashlib.sha256()
        for _, raw in self._raw():
            digest.update(raw)
            self._has_prompt.append(bool(raw.strip()))
        self.digest, self.count, self.last = digest.hexdigest(), sum(self._has_prompt), self._has_prompt.rfind(1)
        if not self.count:
            raise D5P4Error(f"{self.path} holds no prompt: the file is empty, or every line is blank")

    def has_prompt(self, line: int) -> bool:
        return 0 <= line <= self.last and bool(self._has_prompt[line])

    def __iter__(self) -> Iterator[PromptLine]:
        first_line: dict[int, int] = {}  # the line number at which each id came first, by the id's key
        for number, raw in self._raw():
            if not raw.strip():
                continue
            entry = self._parse(number, raw)
            if entry.id is not None and (first := first_line.setdefault(key_of(entry.id), number)) != number:
                entry = replace(entry, error=f"id {entry.id!r} was used before, in line {first}; ids must differ")
            yield entry

    def check_unchanged(self) -> None:
        if self._current_stamp() != self._stamp:
            raise D5P4Error(f"{self.path} was changed while it was being decoded; restore it and run the command again")

    def _current_stamp(self) -> tuple[int, ...] | None:
        with suppress(OSError):  # `_raw` will raise a clearer error
            status = self.path.stat()
            return status.st_size, status.st_mtime_ns, status.st_ino
        return None

    def _raw(self) -> Iterator[tuple[int, bytes]]:
        try:
            with self.path.open("rb") as file:
                yield from enumerate(file, start=1)
        except OSError as reason:
            facts = {FileNotFoundError: "does not exist", IsADirectoryError: "is a folder, not a file of prompts"}
            fact = facts.get(type(reason), f"cannot be read: {reason.strerror or reason}")
            raise D5P4Error(f"{self.path} {fact}") from None

    def _parse(self, number: int, raw: bytes) -> PromptLine:
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8").removesuffix("\n").removesuffix("\r")
            if self.text:
                return PromptLine(number, None, line, {"prompt": line})
            entry = finite(json.loads(line))
        except UnicodeDecodeError as error:
            return PromptLine(number, error=f"not UTF-8 text: byte {error.start} of the line cannot be read")
        except (ValueError, RecursionError) as error:
            return PromptLine(number, error=f"not valid JSON: {error}")
        if not isinstance(entry, dict):
            return PromptLine(number, error=f"expected a JSON object, found {_kind(entry)}")
        return prompt_line(number, entry)


def prompt_line(number: int, entry: dict[str, Any]) -> PromptLine:
    """Return the line with this number for an entry with the fields `prompt` or `messages`, and `id`."""
    try:
        line = PromptLine(number, *_id_and_prompt(entry), entry)
        json.dumps(entry, ensure_ascii=False).encode()
        return line
    except UnicodeEncodeError:
        return PromptLine(number, error=HALF_PAIR)
    except D5P4Error as error:
        return PromptLine(number, fields=entry, error=str(error))


def _id_and_prompt(entry: Mapping[str, Any]) -> tuple[str | int | None, Any]:
    prompt, messages, name = (entry.get(key) for key in ("prompt", "messages", "id"))
    if prompt is not None and messages is not None:
        raise D5P4Error("has both 'prompt' and 'messages'; keep only one of them")
    if prompt is None and messages is None:
        raise D5P4Error("has neither 'prompt' nor 'messages'; add one of them")
    if messages is None and not isinstance(prompt, str):
        raise D5P4Error(f"'prompt' must be text, not {_kind(prompt)}")
    if prompt is None and not (isinstance(messages, list) and messages):
        raise D5P4Error("'messages' must be a list of at least one message")
    for message in messages or ():
        if not (isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))):
            raise D5P4Error("each message must be an object with 'role' and 'content', both of them text")
    if name is not None and (not isinstance(name, (str, int)) or isinstance(name, bool)):
        raise D5P4Error(f"'id' must be text or a whole number, not {_kind(name)}")
    return name, messages if prompt is None else prompt


def _kind(value: Any) -> str:
    numbers = dict.fromkeys((int, float), "a number")
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null", **numbers}
    return names.get(type(value), type(value).__name__)  # a data set may have types that JSON lacks
