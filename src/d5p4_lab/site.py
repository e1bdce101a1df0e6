"""`python -m d5p4_lab site`: build the documentation site from docs/, with Zensical.

The pages are also read on a code host, which accepts more than Zensical does. So they are *staged* before the build:
copied to a folder and changed on the way.

* Links may lead out of docs/. Their targets are staged, too: a page as it is; a source file, notebook or folder as a
  page that shows it; any other file as a copy.
* Zensical uses Python-Markdown, which needs blank lines around lists, tables and code blocks, and four spaces inside
  list items.
* A committed page stays short. `<!-- site: KIND: NAME | HEADING -->` on a line of its own becomes a section with this
  heading and a table that is drawn from the committed results (`bench.tables`). Other comments are left out.
* docs/python.md is replaced by the signatures and docstrings of all public names, and docs/claims.md by the figures,
  intervals and sample sizes of all claims.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from d5p4.errors import D5P4Error

from .bench.tables import pages as pages_with_tables
from .paper.claims import full_page
from .reference_pages import python_page

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
OUT = ROOT / "out"
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[)#])")  # the file that a link names, without its anchor
ITEM = re.compile(r"( *)([*+-]|\d+\.)( +)")
FENCE = re.compile(r" *(```+|~~~+)")
TABLE = re.compile(r"^<!-- site: ([\w-]+): ([\w-]+) \| (.+) -->$", re.MULTILINE)
CLAIMS, BOX = DOCS / "claims.md", Path(__file__).parent / "results" / "box"
WRITTEN: dict[Path, Callable[[], str]] = {  # pages that only the site has in full
    CLAIMS: lambda: full_page(BOX, CLAIMS),
    DOCS / "python.md": python_page,
}
UNLISTED = "---\nsearch:\n  exclude: true\n---\n"


def build(out: Path = OUT) -> Path:
    """Write the site to the folder `site` in `out`, and return that folder."""
    pages, site = out / "pages", out / "site"
    for folder in (pages, site):
        shutil.rmtree(folder, ignore_errors=True)
    stage(pages)
    shutil.copy(DOCS / "zensical.toml", out)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "-f", str(out / "zensical.toml")]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if run.returncode:
        print(run.stdout.partition("Traceback")[0], file=sys.stderr)
        raise D5P4Error("zensical found errors in the pages (see above); correct them and build the site again")
    return site


def stage(pages: Path) -> None:
    """Write docs/, and every file of the repository that its pages link to, to the folder `pages`."""
    waiting = [path for path in DOCS.rglob("*") if path.is_file() and path.suffix != ".toml"]
    waiting += [ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
    staged = set(waiting)
    while waiting:
        source = waiting.pop()
        target = pages / place(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.suffix != ".md":
            shutil.copyfile(source, target)
            continue
        text, links = rewritten(page_of(source), source)
        target.write_text(text, encoding="utf-8")
        waiting += links - staged
        staged |= links


def place(path: Path) -> Path:
    """Return the path on the site of a file or folder of the repository."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS)
    if path == ROOT / "README.md":
        return Path("index.md")
    target = path.relative_to(ROOT)
    if path.is_dir():
        return target / "index.md"
    return target.with_name(target.name + ".md") if path.suffix in (".ipynb", ".py", ".toml") else target


def page_of(path: Path) -> str:
    """Return the Markdown of a page, a source file, a notebook or a folder."""
    if path.is_dir():
        names = sorted(child.name for child in path.iterdir() if child.is_file() and child.name != "__init__.py")
        return f"{UNLISTED}# {path.relative_to(ROOT)}\n\n" + "".join(f"* [{name}]({name})\n" for name in names)
    if path in WRITTEN:
        return WRITTEN[path]()
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return TABLE.sub(section_of_table, text)
    if path.suffix == ".ipynb":
        return "\n\n".join(part for cell in json.loads(text)["cells"] for part in parts_of(cell)) + "\n"
    return f"{UNLISTED}# {path.relative_to(ROOT)}\n\n````{path.suffix[1:]}\n{text}````\n"


def section_of_table(mark: re.Match[str]) -> str:
    kind, name, heading = mark.groups()
    draw = pages_with_tables().get(f"<!-- {kind}: {name} -->")
    if draw is None:
        raise D5P4Error(f"{mark[0]} names a table that does not exist; `bench.tables.pages` has all tables")
    return f"### {heading}\n\n{draw()}\n"


def parts_of(cell: dict[str, Any]) -> Iterator[str]:
    """Yield the source of a cell of a notebook, and its outputs, as Markdown."""
    is_code = cell["cell_type"] == "code"
    source = "".join(cell["source"])
    yield f"````python\n{source}\n````" if is_code else source
    for output in cell["outputs"] if is_code else ():
        data = output.get("data", {"text/plain": output.get("text", output.get("traceback", ""))})
        if "image/png" in data:
            yield f"![Output of the cell](data:image/png;base64,{''.join(data['image/png'].split())})"
        elif "text/html" in data:
            yield "".join(data["text/html"])
        else:
            yield f"````text\n{''.join(data['text/plain']).rstrip()}\n````"


def rewritten(text: str, source: Path) -> tuple[str, set[Path]]:
    """Return the page for Zensical, and the files outside docs/ that it links to."""
    base, links = place(source).parent, set()
    folder = source if source.is_dir() else source.parent

    def moved(match: re.Match[str]) -> str:
        if ":" in match[0]:
            return match[0]
        path = (folder / match[0]).resolve()
        if not path.is_relative_to(ROOT) or not path.exists():
            raise D5P4Error(f"{source.relative_to(ROOT)}: {match[0]} does not exist")
        if not path.is_relative_to(DOCS) and path != ROOT / "README.md":
            links.add(path)
        return Path(os.path.relpath(place(path), base)).as_posix()

    lines = [line if code else LINK.sub(moved, line) for line, code in normalised(text)]
    return "\n".join(lines) + "\n", links


def normalised(text: str) -> Iterator[tuple[str, bool]]:
    """Yield the lines of a page as Python-Markdown needs them, and whether a line belongs to a code block."""
    offsets: list[int] = []  # the columns where the texts of the enclosing list items begin
    fence, before, long_item = "", "", False
    for line in text.splitlines():
        if not line or (not fence and line.startswith("<!--")):
            yield "", bool(fence)
            before = ""
            continue
        indent, item, mark = len(line) - len(line.lstrip()), ITEM.match(line), FENCE.match(line)
        depth = len(offsets)
        if not fence and (item or not before):
            offsets = [offset for offset in offsets if offset <= indent]
        first_item = item and (not depth or long_item)
        first_row = line.lstrip().startswith("|") and not before.lstrip().startswith("|")
        at_code = mark or FENCE.match(before)  # this line begins a code block, or the line before ended one
        if not fence and before and (first_item or first_row or at_code):
            yield "", False
        yield "    " * len(offsets) + line[min(indent, offsets[-1] if offsets else 0) :], bool(fence or mark)
        if mark and (not fence or mark[1] == fence):
            fence = "" if fence else mark[1]
        elif item and not fence:
            offsets.append(len(item[0]))
            long_item = False
        elif not before:
            long_item = bool(offsets)  # a list item of more than one paragraph
        before = line
