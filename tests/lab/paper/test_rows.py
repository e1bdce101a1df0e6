"""The rows of an experiment: one loop makes the missing ones, wherever an earlier run was stopped."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from d5p4.distributed import Mesh
from d5p4.errors import D5P4Error
from d5p4_lab.paper.drawing import Drawing
from d5p4_lab.paper.rows import Source, fill
from d5p4_lab.paper.setup import Experiment, Setup

OWN = Experiment("own", "Title", "nowhere", {"box": {}}, lambda setup: Drawing([]))
TEXT = 'naïve 漢字 😀 "a"\nline\u2028and\x85more'


def made(keys: Sequence[str]) -> dict[str, Any]:
    return {key: {"value": [int(key), 0.5, None], "text": TEXT} for key in keys}


def source(count: int = 4, path: str = "own/rows.jsonl", make: Any = made, **words: Any) -> Source:
    keys = [str(number) for number in reversed(range(count))]  # files are sorted, whatever the order of the keys
    return Source(path, {"seed": 0, "window": (0, 9)}, keys, make, "numbers", **words)


def run(folder: Path, *sources: Source) -> bool:
    return fill(Setup(OWN, "box", folder), sources, Mesh())


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_kill_at_any_byte_loses_only_the_broken_line(tmp_path):
    """Whole lines on the disk are kept, the others are made again, and the final file is always the same."""
    whole, part = tmp_path / "whole", source()
    assert run(whole, part) and not run(whole, part)
    [written] = bytes_of(whole).values()
    lines = written.splitlines(keepends=True)
    assert json.loads(lines[0]) == {"header": {"seed": 0, "window": [0, 9]}} and len(lines) == 5
    assert [json.loads(line) for line in lines[1:]] == [{"key": key, **row} for key, row in made("0123").items()]
    ends = [sum(map(len, lines[:number])) for number in range(1, 6)]
    near = {end + step for end in ends for step in (-1, 0, 1) if end + step <= len(written)}
    for cut in sorted({*range(0, len(written), 30), *near}):
        folder = tmp_path / str(cut)
        (folder / "own/rows.jsonl.parts").mkdir(parents=True)
        (folder / "own/rows.jsonl.parts/part-7-0.jsonl").write_bytes(written[:cut])
        kept = max(0, sum(end <= cut for end in ends) - 1)
        asked: list[str] = []
        again = replace(part, make=lambda keys, asked=asked: asked.extend(keys) or made(keys))
        assert run(folder, again) == (kept < 4), cut
        assert sorted(asked) == list("0123")[kept:] and bytes_of(folder) == bytes_of(whole), cut


def test_rows_made_with_other_settings_are_refused_by_name(tmp_path):
    run(tmp_path, source())
    assert not run(tmp_path, replace(source(), made_with={"seed": 0, "window": [0, 9]}))
    for made_with, message in (
        ({"seed": 7, "window": [0, 9]}, "other settings: seed was 0 and is 7; give another --out"),
        ({"window": [0, 9], "options": {"beta": 0.1}}, "seed was 0 and is null; options.beta was null and is 0.1;"),
    ):
        with pytest.raises(D5P4Error, match="own/rows.jsonl was made with") as error:
            run(tmp_path, replace(source(), made_with=made_with))
        assert message in str(error.value)
    part = tmp_path / "own/rows.jsonl.parts/part-1-0.jsonl"
    part.parent.mkdir()
    for text in (b"not json\n", b'{"key": "no header"}\n', b"[1]\n", b"\xff\xfe\n"):
        part.write_bytes(text)
        with pytest.raises(D5P4Error, match="part-1-0.jsonl is not a file of rows"):
            run(tmp_path, source(5))
    shutil.rmtree(part.parent)
    run(tmp_path, source(path="own/a.jsonl.xz"))
    whole = (tmp_path / "own/a.jsonl.xz").read_bytes()
    (tmp_path / "own/a.jsonl.xz").write_bytes(whole[:-20])
    with pytest.raises(D5P4Error, match=r"a.jsonl.xz cannot be read .*replace it by an intact copy"):
        run(tmp_path, source(path="own/a.jsonl.xz"))
