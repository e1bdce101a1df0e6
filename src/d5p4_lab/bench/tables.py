"""Redraw every table and figure of the documents that comes from committed results of benchmarks (`make tables`).

    python -m d5p4_lab bench tables

A table lies between <!-- KIND: NAME --> and <!-- end --> of its page. `git diff` shows nothing afterwards unless a
result was measured anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from . import (
    CHECKOUT,
    RESULTS,
    Tables,
    agreement,
    books,
    countdown,
    fill_file,
    gpu_page,
    make_parser,
    read,
    scale_plan,
    serve,
    spare,
)


def pages() -> Iterator[tuple[str, str, Tables]]:
    """(page, kind of table, tables): the pages' paths are those in the checkout."""
    puzzles, prose = countdown.tables(countdown.Book.open(RESULTS / "countdown.json")), read(RESULTS / "books.json")
    written: Tables = {"table": partial(books.table, prose), "texts": partial(books.texts, prose)}
    yield "docs/performance.md", "gpu", gpu_page.tables(read(RESULTS / "gpu.json"))
    yield "docs/performance.md", "agreement", {
        "table": lambda: agreement.table(read(RESULTS / "agreement.json")["cases"])
    }  # fmt: skip
    yield "docs/scale.md", "scale", scale_plan.tables(scale_plan.committed())
    yield "docs/models.md", "countdown", puzzles
    yield "docs/models.md", "books", written
    yield "src/d5p4/models/weights/countdown/README.md", "countdown", puzzles
    yield "models/books/README.md", "books", written
    yield "docs/serving.md", "spare", {"table": lambda: spare.table(read(RESULTS / "spare.json"))}
    yield "docs/serving.md", "serve", {
        "cpu": lambda: serve.table(read(RESULTS / "serve.json")),
        "gpu": lambda: serve.table(read(RESULTS / "serve-gpu.json")),
    }  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    make_parser("tables", __doc__).parse_args(arguments)
    for path, kind, tables in pages():
        fill_file(CHECKOUT / path, kind, tables)
        print(f"{path}: {kind}", flush=True)
    gpu_page.figure(read(RESULTS / "gpu.json"), CHECKOUT / "docs/performance.svg")
    scale_plan.figure(read(RESULTS / "scale.json"), CHECKOUT / "docs/scale.svg")
    print("docs/performance.svg, docs/scale.svg")
