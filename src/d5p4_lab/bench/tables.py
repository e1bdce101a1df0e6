"""Redraw all tables and figures of the documents from the committed results of the benchmarks (`make tables`).

    python -m d5p4_lab bench tables

Each table stands between <!-- KIND: NAME --> and <!-- end --> on a page. After this command, `git diff` shows a change
only if a result or a heading has changed.
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
    books_rules,
    caches,
    countdown,
    fill_file,
    gpu_page,
    make_parser,
    programs,
    read,
    rivals,
    rollouts,
    scale_plan,
    serve,
    solver_quality,
)


def pages() -> Iterator[tuple[str, str, Tables]]:
    """Yield (path of the page, kind of tables, tables) for every page and every kind of tables on the page."""
    puzzles, prose = countdown.tables(read(RESULTS / "countdown.json.xz")), read(RESULTS / "books.json.xz")
    texts: Tables = {
        "table": partial(books.table, prose),
        "texts": partial(books.texts, prose),
        **books_rules.tables(read(RESULTS / "books_rules.json.xz")),
    }
    agreed: Tables = {"table": lambda: agreement.table(read(RESULTS / "agreement.json.xz")["cases"])}
    served: Tables = {
        "cpu": lambda: serve.table(read(RESULTS / "serve.json.xz")),
        "gpu": lambda: serve.table(read(RESULTS / "serve-gpu.json.xz")),
    }
    yield "docs/performance.md", "gpu", gpu_page.tables(read(RESULTS / "gpu.json.xz"))
    yield "docs/performance.md", "agreement", agreed
    yield "docs/models.md", "caches", caches.tables(read(RESULTS / "caches.json.xz"))
    yield "docs/method.md", "solver", solver_quality.tables(read(solver_quality.RESULT))
    yield "docs/scale.md", "scale", scale_plan.tables(scale_plan.committed())
    yield "docs/tree-measurements.md", "countdown", puzzles
    yield "docs/tree-measurements.md", "books", texts
    yield "README.md", "countdown", puzzles
    yield "docs/box.md", "countdown", puzzles
    yield "docs/box.md", "programs", programs.tables(read(RESULTS / "programs.json.xz"))
    yield "docs/box.md", "books", texts
    yield "docs/box.md", "rivals", rivals.tables(rivals.committed())
    yield "src/d5p4/models/weights/countdown/README.md", "countdown", puzzles
    yield "models/books/README.md", "books", texts
    yield "docs/serving.md", "serve", served
    yield "docs/rl.md", "rollouts", rollouts.tables(read(rollouts.RESULT))


def main(arguments: Sequence[str]) -> None:
    make_parser("tables", __doc__).parse_args(arguments)
    for path, kind, tables in pages():
        fill_file(CHECKOUT / path, kind, tables)
        print(f"{path}: {kind}", flush=True)
    gpu_page.figure(read(RESULTS / "gpu.json.xz"), CHECKOUT / "docs/performance.svg")
    scale_plan.figure(read(RESULTS / "scale.json.xz"), CHECKOUT / "docs/scale.svg")
    countdown.figure(read(RESULTS / "countdown.json.xz"), CHECKOUT / "docs/tree.svg")
    rollouts.figure(read(rollouts.RESULT), rollouts.FIGURE)
    print("docs/performance.svg, docs/scale.svg, docs/tree.svg, docs/rollouts.svg")
