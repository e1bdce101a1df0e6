import json
import os
from pathlib import Path

import pytest

from d5p4.errors import D5P4Error
from d5p4_lab.paper.store import JsonLines, write_json, write_text

HEADER = {"model": "books", "seed": 0, "options": {"beta": 0.1, "order": None}}
ROWS = {
    "0": {"text": "naïve — 漢字 😀"},
    "1": {"text": 'a "quoted"\nline\u2028and\x85more'},
    "2": {"values": [1, 2.5, None]},
}


@pytest.fixture
def lines(tmp_path: Path) -> JsonLines:
    held = JsonLines(tmp_path / "deep" / "rows.jsonl", HEADER)
    for key, row in ROWS.items():
        held.add(key, row)
    return held


def contents(held: JsonLines) -> dict[str, dict]:
    return {row["key"]: {name: value for name, value in row.items() if name != "key"} for row in held}


def test_rows_survive(lines):
    again = JsonLines(lines.path, HEADER)
    assert contents(again) == ROWS and len(again) == 3
    assert "1" in again and 1 in again and "3" not in again
    assert again.get(2) == {"key": "2", "values": [1, 2.5, None]} and again.get("none") is None


def test_nothing_is_written_before_the_first_row(tmp_path):
    JsonLines(tmp_path / "rows.jsonl", HEADER)
    assert not (tmp_path / "rows.jsonl").exists()


def test_a_row_is_written_once(lines):
    before = lines.path.read_bytes()
    with pytest.raises(D5P4Error, match="already holds '1'"):
        lines.add(1, {"text": "again"})
    assert lines.path.read_bytes() == before


def test_rows_together(lines):
    lines.add_all({"a": {"x": 1}, "b": {"x": 2}})
    again = JsonLines(lines.path, HEADER)
    assert list(again.rows) == ["0", "1", "2", "a", "b"]
    with pytest.raises(D5P4Error, match="already holds 'b'"):
        again.add_all({"c": {}, "b": {}})
    assert "c" not in JsonLines(lines.path, HEADER)


def test_a_kill_at_any_byte_loses_the_broken_line_only(lines, tmp_path):
    """Whatever part of the file is on the disk: it is read, what is missing is added again, and the file is whole."""
    whole = lines.path.read_bytes()
    ends = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]  # header, then one row each
    for cut in range(len(whole) + 1):
        path = tmp_path / "cut.jsonl"
        path.write_bytes(whole[:cut])
        held = JsonLines(path, HEADER)
        complete = max(sum(end <= cut for end in ends) - 1, 0)
        assert list(held.rows) == list(ROWS)[:complete], cut
        for key, row in ROWS.items():
            if key not in held:
                held.add(key, row)
        assert path.read_bytes() == whole, cut


def test_other_settings_are_refused_and_named(lines):
    before = lines.path.read_bytes()
    other = HEADER | {"seed": 7, "options": {"beta": 0.2, "order": None}, "weights": "abc"}
    with pytest.raises(D5P4Error) as told:
        JsonLines(lines.path, other)
    said = str(told.value)
    assert "seed was 0 and is 7" in said and "'beta': 0.1" in said and "'beta': 0.2" in said
    assert "weights was None and is 'abc'" in said and "model" not in said.split("(")[1] and "--out" in said
    assert lines.path.read_bytes() == before


def test_a_header_of_tuples_is_the_same_as_one_of_lists(tmp_path):
    JsonLines(tmp_path / "a.jsonl", {"window": (0, 64)}).add("x", {})
    assert "x" in JsonLines(tmp_path / "a.jsonl", {"window": [0, 64]})


@pytest.mark.parametrize("text", ["not json\n", '{"key": "no header"}\n', '{"header": {}}\n{"no": "key"}\n', "[1]\n"])
def test_a_file_of_something_else_is_refused(tmp_path, text):
    path = tmp_path / "other.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(D5P4Error, match="not a file of rows"):
        JsonLines(path, {})
    assert path.read_text(encoding="utf-8") == text


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "other.jsonl"
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(D5P4Error, match="not a file of rows"):
        JsonLines(path, {})


def test_numbers_that_json_lacks_are_not_written(lines):
    before = lines.path.read_bytes()
    with pytest.raises(ValueError):
        lines.add("nan", {"value": float("nan")})
    assert lines.path.read_bytes() == before and "nan" not in lines
    lines.add("nan", {"value": None})
    assert JsonLines(lines.path, HEADER).get("nan") == {"key": "nan", "value": None}


def test_a_bad_first_row_leaves_no_file_behind(tmp_path):
    held = JsonLines(tmp_path / "rows.jsonl", HEADER)
    with pytest.raises(ValueError):
        held.add("nan", {"value": float("inf")})
    held.add("good", {"value": 1})
    assert contents(JsonLines(tmp_path / "rows.jsonl", HEADER)) == {"good": {"value": 1}}


def test_files_are_replaced_at_once(tmp_path, monkeypatch):
    file = tmp_path / "deep" / "summary.json"
    write_json(file, {"ü": 1})
    assert json.loads(file.read_text(encoding="utf-8")) == {"ü": 1} and "ü" in file.read_text(encoding="utf-8")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_text(file, "half")
    assert json.loads(file.read_text(encoding="utf-8")) == {"ü": 1}
    with pytest.raises(ValueError):
        write_json(file, float("nan"))
