"""A trace read back, as the page does it."""

from __future__ import annotations

from typing import Any

Row = list[tuple[int, float] | None]  # a piece and its log-probability at each position; None while masked


def pools(trace: dict[str, Any]) -> list[list[Row]]:
    """The rows of every pool, and at the end those of the final one."""
    every_pool: list[list[Row]] = []
    for pool in (*trace["pools"], trace["final"]):
        before = [[None] * trace["length"] if at is None else every_pool[at[0]][at[1]] for at in pool["parents"]]
        every_pool.append([changed(row, new) for row, new in zip(before, pool["changes"], strict=True)])
    return every_pool


def answers(trace: dict[str, Any]) -> list[Row]:
    return [pools(trace)[-1][answer["row"]] for answer in trace["answers"]]


def changed(row: Row, changes: list[list[Any]]) -> Row:
    row = list(row)
    for position, piece, logprob in changes:
        assert row[position] is None, "only masks are revealed"
        row[position] = (piece, logprob)
    return row
