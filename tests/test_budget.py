"""The size of the house: whoever needs more room takes something else out."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINES = {"src/d5p4": 19_000, "src/d5p4_lab": 16_000, "tests": 24_000}  # of Python
WORDS = 50_000  # of Markdown in docs; tests/test_words.py limits the README
MEBIBYTES = 58


def tracked(folder: str = ".", ending: str = "") -> list[Path]:
    names = subprocess.run(["git", "ls-files", "-z", folder], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [ROOT / name for name in names.stdout.split("\0") if name.endswith(ending)]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


@pytest.mark.parametrize("folder", LINES)
def test_lines_of_python(folder):
    counts = {path: path.read_text(encoding="utf-8").count("\n") for path in tracked(folder, ".py")}
    assert 1_000 < sum(counts.values()) <= LINES[folder]


def test_words_of_the_documents():
    assert 1_000 < sum(len(path.read_text(encoding="utf-8").split()) for path in tracked("docs", ".md")) <= WORDS


def test_bytes_of_all_tracked_files():
    assert 1 << 20 < sum(path.stat().st_size for path in tracked()) <= MEBIBYTES << 20
