"""A trace read back, as the page does it."""

from __future__ import annotations

from typing import Any

Row = list[tuple[int, float] | None]  # a piece and its log-probability at each position; None while masked


def pools(trace: dict[str, Any]) -> list[list[Row]]:
    """The rows of every pool."""
    rows: list[Row] = [[None] * trace["length"] for _ in trace["pools"][0]["group"]]
    every_pool = [rows]
    for before, pool in zip(trace["pools"], trace["pools"][1:], strict=False):
        parents = [before["chosen"][n // before["children"]] for n in range(len(pool["group"]))]
        rows = [changed(rows[parent], new) for parent, new in zip(parents, pool["changes"], strict=True)]
        every_pool.append(rows)
    return every_pool


def answers(trace: dict[str, Any]) -> list[Row]:
    last = pools(trace)[-1]
    return [changed(last[answer["lineage"][-1]], answer["changes"]) for answer in trace["answers"]]


def changed(row: Row, changes: list[list[Any]]) -> Row:
    row = list(row)
    for position, piece, logprob in changes:
        assert row[position] is None, "only masks are revealed"
        row[position] = (piece, logprob)
    return row
