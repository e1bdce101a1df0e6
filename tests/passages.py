"""Passages of the project, drawn by a seed, for a stranger to read: python -m tests.passages --seed 1 --count 100"""

import argparse
import ast
import io
import random
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def docstrings(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            name = getattr(node, "name", "")
            if text and len(text.split()) > 5:
                yield f"docstring {name}: {text}"


def comments(file: Path) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(file.read_text(encoding="utf-8")).readline):
        if token.type == tokenize.COMMENT and len(token.string.split()) > 4 and "noqa" not in token.string:
            yield f"{token.line.strip()}"


def messages(file: Path) -> Iterator[str]:
    """Sentences inside strings: help, errors, notes."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Call, ast.Raise)):
            for part in ast.iter_child_nodes(node):
                text = ast.unparse(part) if isinstance(part, (ast.JoinedStr, ast.Constant)) else ""
                if len(text.split()) > 5:
                    yield f"message: {text}"


def paragraphs(file: Path) -> Iterator[str]:
    text = re.sub(r"```.*?```", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)
    for block in re.split(r"\n\s*\n", text):
        if len(block.split()) > 8 and not block.lstrip().startswith(("|", "<", "#")):
            yield f"paragraph: {block.strip()}"


def passages() -> list[tuple[str, str]]:
    sources = sorted((ROOT / "src").rglob("*.py"))
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    readers = [(sources, docstrings), (sources, comments), (sources, messages), (pages, paragraphs)]
    return [(str(file.relative_to(ROOT)), text) for files, read in readers for file in files for text in read(file)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100)
    given = parser.parse_args()
    everything = passages()
    for number, (place, text) in enumerate(random.Random(given.seed).sample(everything, given.count), 1):
        print(f"--- {number} ({place})\n{text}\n")
