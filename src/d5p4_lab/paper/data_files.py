"""Finds the files of a data set in a folder or on the hub, and reads plain or compressed files as records or text."""

from __future__ import annotations

import gzip
import json
import lzma
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from d5p4.errors import D5P4Error
from d5p4.models.load import HUB_ID

RECORDS = (".jsonl", ".json", ".parquet")
TEXTS = (".txt", ".md", ".jsonl", ".json", ".parquet")  # in files of records, the field `text` contains the text
SPLITS = {"train": ("train",), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}

_OPENERS = {".xz": lzma.open, ".gz": gzip.open}
_SHARD = re.compile(r"-\d{5}-of-\d{5}\b")


def locate(path: str | Path, split: str, *, folder: str = "data", suffixes: Sequence[str] = RECORDS) -> list[Path]:
    """Return the files of a split. `path` is a file, a folder or a hub id. The subfolder `folder` is searched first.

    A file belongs to a split if the file's name contains the split's name as a word: `dev_rand_split.jsonl` belongs to
    `validation`. If there are no such files, the files without a split in the name are returned.
    """
    here = Path(path).expanduser()
    if here.is_file():
        return [here]
    if not here.exists():
        # A name with the suffix of a data file is more likely a wrong path than the id of a data set.
        if isinstance(path, Path) or not HUB_ID.fullmatch(path) or suffix(here) in (*RECORDS, *TEXTS):
            raise D5P4Error(f"{str(path)!r} does not exist: give a file, a folder or a hub id of the form org/name")
        here = _download(path, [f"*{name}*{ending}" for name in SPLITS[split] for ending in suffixes])
    # The subfolder comes first, because the folder itself may also contain files that describe the data.
    for place in (here / folder, here):
        files = [file for file in sorted(place.glob("*")) if file.is_file() and suffix(file) in suffixes]
        words = {file: set(re.split(r"[^a-z0-9]+", file.name.lower())) for file in files}
        every_name = {word for names in SPLITS.values() for word in names}
        chosen = [file for file in files if words[file] & set(SPLITS[split])]
        chosen = chosen or [file for file in files if not words[file] & every_name]
        if len(chosen) > 1 and not all(_SHARD.search(file.name) for file in chosen):
            listed = ", ".join(file.name for file in chosen)
            raise D5P4Error(f"{place} has several files that could be the {split} split ({listed}): give one path")
        if chosen:
            return chosen
    raise D5P4Error(f"{path} has no file of the {split} split ({', '.join(suffixes)}; also with .xz or .gz)")


def suffix(file: Path) -> str:
    return (Path(file.stem) if file.suffix.lower() in _OPENERS else file).suffix.lower()


def read_text(file: Path) -> str:
    opener: Any = _OPENERS.get(file.suffix.lower(), open)
    try:
        with opener(file, "rb") as stream:
            return stream.read().decode("utf-8-sig")
    except UnicodeDecodeError as reason:
        raise D5P4Error(f"{file} is not UTF-8 text: byte {reason.start} cannot be read") from None
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as reason:
        raise D5P4Error(f"{file} cannot be read: {reason}") from reason


def read_records(file: Path) -> list[dict[str, Any]]:
    """Return the records of a file: JSON lines, a JSON list, or parquet."""
    if suffix(file) == ".parquet":
        return _parquet(file)
    text = read_text(file)
    if suffix(file) == ".json" and text.lstrip().startswith("["):
        entries = [(f"{file} entry {i}", entry) for i, entry in enumerate(_parsed(str(file), text), 1)]
    else:  # str.splitlines would also split at U+2028, which a JSON string may contain
        lines = [(f"{file} line {i}", line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
        entries = [(place, _parsed(place, line)) for place, line in lines]
    for place, entry in entries:
        if not isinstance(entry, dict):
            raise D5P4Error(f"{place} is not a JSON object")
    return [entry for _, entry in entries]


def _parsed(place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as reason:
        raise D5P4Error(f"{place} is not valid JSON: {reason}") from None


def _parquet(file: Path) -> list[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as missing:
        raise D5P4Error(f"{file} is a parquet file; to read it, install pyarrow: pip install pyarrow") from missing
    try:
        with parquet.ParquetFile(file) as table:
            return table.read().to_pylist()
    except (OSError, ArrowException) as reason:
        raise D5P4Error(f"{file} cannot be read as parquet: {reason}") from reason


def _download(hub_id: str, patterns: Sequence[str]) -> Path:
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(hub_id, repo_type="dataset", allow_patterns=list(patterns)))
    except Exception as reason:  # the hub client raises many unrelated exceptions
        first = (str(reason).strip() or "no reason given").splitlines()[0].split(". ")[0].rstrip(".")
        raise D5P4Error(
            f"{hub_id!r} is not a file or folder on this machine, and fetching it from the hub failed "
            f"({type(reason).__name__}: {first}); give the path of its files instead"
        ) from reason
