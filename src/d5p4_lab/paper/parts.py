"""Rows that several ranks decode: each appends to a part of its own, which the first rank folds into the case's file.

A part is named by start and rank, so that a process which outlives its start writes into no file of another, and parts
of a start that died are folded by the next one, however many ranks that has.
"""

from __future__ import annotations

from .store import JsonLines


def part(rows: JsonLines, start: str, rank: int) -> JsonLines:
    """Where a rank puts its rows of a case, beside the case's file."""
    return JsonLines(rows.path.with_name(f"{rows.path.name}.part-{start}-{rank}"), rows.header, mend=False)


def fold(rows: JsonLines) -> None:
    """Add the rows of all parts to the case's file, each once and in the order of units; then the parts may go."""
    paths = sorted(rows.path.parent.glob(f"{rows.path.name}.part-*"))
    found = {}
    for path in paths:
        for key, row in JsonLines(path, rows.header, mend=False).rows.items():
            if key not in rows:
                found[key] = row
    if found:
        rows.add_all({key: found[key] for key in sorted(found, key=int)})
    for path in paths:
        path.unlink(missing_ok=True)
