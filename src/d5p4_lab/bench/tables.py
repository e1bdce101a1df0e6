"""Redraw all tables of the documents, docs/tree.svg and docs/language.svg from the committed results (`make tables`).

    python -m d5p4_lab bench tables

A table stands on a page between <!-- KIND: NAME --> and <!-- end -->. After this command, `git diff` shows a change
only if a result or a heading has changed. To add a table, add its functions to `KINDS`.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

from ..tables import Tables, fill
from . import (
    CHECKOUT,
    RESULTS,
    countdown,
    gpu,
    language,
    make_parser,
    read,
    read_sections,
    rivals,
    rollouts,
    scale,
    serve,
    smol,
)
from . import (
    fill as gaps,
)

KINDS: dict[str, Callable[[], Tables]] = {
    "countdown": lambda: countdown.tables(read(RESULTS / "countdown.jsonl.xz")),
    "fill": lambda: gaps.tables(read(gaps.RESULT)),
    "gpu": lambda: gpu.tables(read_sections(RESULTS / "gpu.jsonl.xz")),
    "language": lambda: language.tables(read(language.RESULT)),
    "rivals": lambda: rivals.tables(rivals.committed(), rivals.Sizes()),
    "rollouts": lambda: rollouts.tables(read(rollouts.RESULT)),
    "scale": lambda: scale.tables(read_sections(RESULTS / "scale.jsonl.xz")),
    "scaling": lambda: {"optimum": optimum_table},
    "serve": serve.tables,
    "smol": lambda: smol.tables(read(smol.RESULT)),
}


def optimum_table() -> str:
    """Return the table of `reproduce scaling` that compares its methods with exhaustive search."""
    page = (RESULTS.parent / "box/scaling/table.md").read_text(encoding="utf-8")
    return page.split("### Against the optimum\n\n")[1].strip()


@cache
def _tables_of(kind: str) -> Tables:
    return KINDS[kind]()


def pages() -> dict[str, Callable[[], str]]:
    """Return {marker: function that returns the table as Markdown}, such as "<!-- countdown: readme -->"."""
    return {f"<!-- {kind}: {name} -->": draw for kind in KINDS for name, draw in _tables_of(kind).items()}


def drawn(page: str) -> str:
    """Return a page with all its tables drawn from the committed results."""
    for kind in kinds_on(page):
        page = fill(page, kind, _tables_of(kind))
    return page


def kinds_on(page: str) -> set[str]:
    return set(re.findall(r"^<!-- (\w+): [\w-]+ -->$", page, flags=re.MULTILINE)) & set(KINDS)


def marked_pages() -> Iterator[Path]:
    """Yield the committed pages that have tables."""
    folders = ("*.md", "docs/**/*.md", "models/**/*.md", "src/d5p4/models/weights/**/*.md")
    for path in sorted(path for folder in folders for path in CHECKOUT.glob(folder)):
        if kinds_on(path.read_text(encoding="utf-8")):
            yield path


def main(arguments: Sequence[str]) -> None:
    make_parser("tables", __doc__, device=False).parse_args(arguments)
    for path in marked_pages():
        path.write_text(drawn(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(path.relative_to(CHECKOUT), flush=True)
    countdown.figure(read(RESULTS / "countdown.jsonl.xz"), CHECKOUT / "docs/tree.svg")
    print("docs/tree.svg")
    if results := read(language.RESULT):
        language.figure(results, CHECKOUT / "docs/language.svg")
        print("docs/language.svg")
