"""Write files so that a killed process does no damage. Each call returns only when its data is on the disk."""

import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any


def json_bytes(value: Any) -> bytes:
    """Return a value as JSON without spaces. Lone surrogates, which UTF-8 cannot encode, are written as escapes."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def json_line(value: Any) -> bytes:
    return json_bytes(value) + b"\n"


def append(path: Path, lines: Iterable[bytes]) -> None:
    """Append lines to a file. The file is created if it does not exist, but its folder must exist."""
    new = not path.exists()
    with open(path, "ab", opener=_without_links) as file:
        file.write(b"".join(lines))
        file.flush()
        os.fsync(file.fileno())
    if new:
        sync_folder(path.parent)


def replace_file(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Replace the contents of a file at once. If the process is killed, either the old or the new file is left. If
    writing fails, the old file is left."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.unlink(missing_ok=True)  # a killed process may have left it; if it is a link, its target is left alone
        with open(partial, "xb", opener=_without_links) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)  # frees space, because a full disk may be the cause
        raise
    sync_folder(path.parent)


def _without_links(path: str, flags: int) -> int:
    """Open a file, but never the target of a symbolic link, because the names of these files can be foreseen."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def sync_folder(folder: Path) -> None:
    """Make sure that the names of new and moved files in a folder are on the disk, if the system can do so."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:  # some network file systems do not support fsync of a folder
        pass
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Replace the contents of a file by a text (see `replace_file`). Missing folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode("utf-8")
    replace_file(path, lambda file: file.write(data))


def read_json(path: Path) -> Any:
    """Return the contents of a JSON file, or None if the file does not exist."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
