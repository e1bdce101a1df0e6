"""Raw rows of an experiment: append-only JSON lines that survive a kill and say what they were made with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from d5p4.errors import D5P4Error
from d5p4.store import append, json_line, read_json, write_json, write_text

__all__ = ["JsonLines", "read_json", "write_json", "write_text"]


class JsonLines:
    """A file whose first line says what it holds and whose others have a `key` each; a row is written once.

    A last line broken by a kill is dropped. A file made with something else is refused, with the differences.
    `mend=False`: the broken line is left where it is, in a file that another process writes or puts right.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], mend: bool = True) -> None:
        self.path, self.header, self.mend = path, dict(header), mend
        self.rows: dict[str, dict[str, Any]] = {}
        if path.exists():
            self._read()

    def __contains__(self, key: object) -> bool:
        return str(key) in self.rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows.values())

    def __len__(self) -> int:
        return len(self.rows)

    def get(self, key: object) -> dict[str, Any] | None:
        return self.rows.get(str(key))

    def add(self, key: object, row: Mapping[str, Any]) -> None:
        """Write one row; it is on the disk when this returns."""
        self.add_all({str(key): row})

    def add_all(self, rows: Mapping[str, Mapping[str, Any]]) -> None:
        """Write rows by their keys, together; they are on the disk when this returns."""
        if held := [key for key in rows if key in self]:
            raise D5P4Error(f"{self.path} already holds {held[0]!r}")
        lines = {key: {"key": key, **row} for key, row in rows.items()}
        head = [] if self.path.exists() else [{"header": self.header}]
        data = [json_line(line) for line in (*head, *lines.values())]  # all or nothing of what can be written
        self.path.parent.mkdir(parents=True, exist_ok=True)
        append(self.path, data)
        self.rows |= lines

    def _read(self) -> None:
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data) and self.mend:
            with self.path.open("r+b") as file:
                file.truncate(len(whole))
        if not whole:
            if self.mend:
                self.path.unlink()
            return
        try:
            # Not splitlines: answers may hold other characters that end a line.
            head, *lines = [json.loads(line) for line in whole.decode("utf-8").split("\n")[:-1]]
            held = head["header"]
            self.rows = {line["key"]: line for line in lines}
        except (ValueError, KeyError, TypeError) as reason:
            raise D5P4Error(f"{self.path} is not a file of rows ({reason}); move it away") from reason
        wanted = json.loads(json.dumps(self.header))
        if held != wanted:
            names = sorted(name for name in {*held, *wanted} if held.get(name) != wanted.get(name))
            told = "; ".join(f"{name} was {held.get(name)!r} and is {wanted.get(name)!r}" for name in names)
            raise D5P4Error(f"{self.path} was made with other settings ({told}); give another --out")
