from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.work import decode_here, entries, write


@pytest.fixture(scope="session")
def whole(tmp_path_factory) -> bytes:
    """The file of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    write(folder / "p.jsonl", entries())
    decode_here(folder)
    return (folder / "a.jsonl").read_bytes()


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with the input of that run."""
    write(tmp_path / "p.jsonl", entries())
    return tmp_path
