"""Tables and figures as text: Markdown tables, numbers with their intervals, and pages with marked tables.

A page has a table between the lines <!-- KIND: NAME --> and <!-- end -->; `fill` writes it there.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from d5p4.errors import D5P4Error

from .statistics import Figure

Row = dict[str, Any]
Tables = Mapping[str, Callable[[], str]]  # {NAME: function that returns Markdown}


@dataclass(frozen=True)
class Table:
    """A table with a title and a note."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""

    def markdown(self) -> str:
        parts = [f"### {self.title}", markdown(self.columns, self.rows), self.note]
        return "\n\n".join(part for part in parts if part)


def markdown(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table. A cell that is None becomes a dash, and a float gets three digits (see `number`)."""
    cells = [list(header), ["---"] * len(header)]
    cells += [["–" if value is None else number(value) for value in row] for row in rows]
    return "\n".join(f"| {' | '.join(map(cell, line))} |" for line in cells)


def table_of(rows: Sequence[Row]) -> str:
    """Return a Markdown table of rows {heading: cell}."""
    return markdown(list(rows[0]), [list(row.values()) for row in rows])


def cell(text: object) -> str:
    """Put a text on one line and escape its vertical bars, so that the text fits into a Markdown table."""
    return " ".join(str(text).split()).replace("|", r"\|")


def number(value: Any) -> str:
    """Return a value as text: floats have three digits, or are whole from 100 on. None becomes the empty text."""
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def half_width(interval: Sequence[float], digits: int, scale: float = 1.0) -> str:
    """Return [mean, low, high] as "41.2 ± 2.1": the mean and half the width of the interval."""
    mean, low, high = interval
    return f"{scale * mean:.{digits}f} ± {scale * (high - low) / 2:.{digits}f}"


def shown(figure: Figure, digits: int = 2, scale: float = 1.0) -> str:
    """Return a figure as "41.2 [39.0, 43.3]", or its value alone if there is no interval."""
    value, low, high = (f"{scale * x:.{digits}f}" for x in (figure.value, figure.low, figure.high))
    return f"{value} [{low}, {high}]" if figure.low == figure.low else value


def listed(names: Iterable[object], figures: Iterable[Figure], digits: int = 2, scale: float = 1.0) -> str:
    """Return named figures on one line, such as "judge 0.31 [0.28, 0.34]; smollm2 0.29 [0.26, 0.32]"."""
    return "; ".join(f"{name} {shown(f, digits, scale)}" for name, f in zip(names, figures, strict=True))


def fill(page: str, kind: str, tables: Tables) -> str:
    """Return the page with new tables of one kind."""

    def replacement(match: re.Match[str]) -> str:
        if match[1] not in tables:
            raise D5P4Error(f"no command makes the table {kind}: {match[1]}; choose from {', '.join(tables)}")
        return f"<!-- {kind}: {match[1]} -->\n{tables[match[1]]()}\n<!-- end -->"

    return re.sub(rf"^<!-- {kind}: ([\w-]+) -->$.*?^<!-- end -->$", replacement, page, flags=re.DOTALL | re.MULTILINE)
