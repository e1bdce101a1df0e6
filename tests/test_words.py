"""Rules for words: short pages, short lines, links that lead somewhere, names that carry content, "per" for rates."""

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINKING = [*PAGES, ROOT / "CHANGELOG.md", *sorted((ROOT / "examples").rglob("*.ipynb"))]
SOURCES = sorted(path for folder in ("src", "tests", "examples") for path in (ROOT / folder).rglob("*.py"))
DRAWN_PAGES = {"claims.md"}  # written whole by `python -m d5p4_lab claims`

README_WORDS = 900
LINE_LENGTH = 120
EMPTY_NAMES = {"found", "held", "told", "said", "each"}

# A quantity, "a" or "an", and a unit: write "per" instead. "Bytes a rank sends" and "a second time" are no rates.
QUANTITY = (
    r"\d[\d.,]*|k|w|n|one|two|three|four|five|six|eight|ten|many|few|(?:an?|one) (?!is|of|in|on|as|or|if)[\w-]+|"
    r"answers|batches|beams|bits|bytes|candidates|children|copies|decodes|draws|entries|forwards|GPU-seconds|GPUs|"
    r"lines|masks|nats|numbers|operations|parents|points|positions|prompts|puzzles|repeats|requests|rows|samples|"
    r"seconds|sequences|sets|slots|steps|symbols|texts|tokens|uniforms|units|values|words|ms|µs|s|[kMGT]i?B"
)
UNIT = (
    r"answer|batch|beam|block|byte|call|candidate|case|child|column|decode|draw|forward|GPU|group|host|hour|item|"
    r"kernel|line|method|minute|node|parent|point|pool|position|process|prompt|puzzle|rank|request|row|run|sample|"
    r"second(?! time)|sequence|set|start|step|text|token|unit|value|window|word"
)
CLAUSE = r"(?! (?:sends|has|holds|takes|needs|may|can|will)\b)"
ARTICLE = re.compile(r"\san?\s")
RATE = re.compile(rf"(?<![\w.-])(?:{QUANTITY}) an? (?:{UNIT})\b(?!-){CLAUSE}", re.IGNORECASE)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose_lines(path: Path, drawn: bool = True) -> Iterator[tuple[int, str]]:
    """The lines of a page or notebook outside code, with their numbers; `drawn`: also parts that a command writes."""
    in_code = in_drawn = False
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        text = "\n".join("".join(cell["source"]) for cell in cells)
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif line.startswith("<!-- "):
            in_drawn = not line.startswith(("<!-- end", "<!-- site:"))  # what is drawn into the site is not in the page
        elif not in_code and (drawn or not in_drawn):
            yield number, line


def anchors_of(path: Path) -> set[str]:
    """The names that links can give to the headings of a page."""
    headings = [line.lstrip("#").strip() for _, line in prose_lines(path) if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def strings_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """All string literals; a value inside an f-string counts as the number 0."""
    pieces = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            pieces |= {id(value) for value in node.values}
            text = "".join(str(v.value) if isinstance(v, ast.Constant) else "0" for v in node.values)
            yield node.lineno, text
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in pieces:
            yield node.lineno, node.value


@cache
def tree_of(path: Path) -> ast.AST:
    return ast.parse(path.read_text(encoding="utf-8"))


def names_of(tree: ast.AST) -> Iterator[tuple[int, str | None]]:
    """Every name of a value: variables, arguments, keywords, attributes, and what `as` binds."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield line, node.id
        elif isinstance(node, (ast.arg, ast.keyword)):
            yield line, node.arg
        elif isinstance(node, ast.Attribute):
            yield line, node.attr
        elif isinstance(node, ast.alias):
            yield line, node.asname
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)):
            yield line, node.name


def test_readme_is_read_in_three_minutes():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    words = sum(len(line.split()) for line in lines if not line.startswith("[!["))
    assert words <= README_WORDS


def test_lines_of_markdown_are_short():
    """Table rows, code blocks and the targets of links may be longer; so may what a command writes."""
    long_lines = []
    for path in PAGES:
        if path.name in DRAWN_PAGES:
            continue
        for number, line in prose_lines(path, drawn=False):
            visible = re.sub(r"\]\([^)]*\)|<?https?://\S+", "]", line)
            if len(visible) > LINE_LENGTH and not line.lstrip().startswith("|"):
                long_lines.append(f"{relative(path)}:{number}: {len(visible)} characters")
    assert not long_lines, "\n".join(long_lines)


def test_links_lead_to_files_and_headings_that_exist():
    broken = []
    for path in LINKING:
        for number, line in prose_lines(path):
            for target in re.findall(r"\]\(([^)\s]+)\)", line):
                file, _, anchor = target.partition("#")
                page = (path.parent / file).resolve() if file else path
                if "://" not in target and (not page.exists() or (anchor and anchor not in anchors_of(page))):
                    broken.append(f"{relative(path)}:{number}: {target}")
    assert not broken, "\n".join(broken)


def test_names_of_values_carry_content():
    empty = []
    for path in SOURCES:
        empty += [f"{relative(path)}:{line}: {name}" for line, name in names_of(tree_of(path)) if name in EMPTY_NAMES]
    assert not empty, f"{len(empty)} names say nothing:\n" + "\n".join(empty)


def test_rates_are_written_with_per():
    rates = []
    for path in SOURCES:
        lines = path.read_text(encoding="utf-8").splitlines()
        comments = [(line, text.partition("#")[2]) for line, text in enumerate(lines, 1)]
        for line, prose in (*strings_of(tree_of(path)), *comments):
            if ARTICLE.search(prose):
                rates += [f"{relative(path)}:{line}: {match[0]}" for match in RATE.finditer(" ".join(prose.split()))]
    for path in PAGES:
        for line, prose in prose_lines(path):
            rates += [f"{relative(path)}:{line}: {match[0]}" for match in RATE.finditer(prose)]
    assert not rates, f'{len(rates)} rates without "per":\n' + "\n".join(rates)
