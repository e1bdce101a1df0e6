"""The benchmark of approximate caches decodes the same prompts in every way, and its tables come from its rows."""

import d5p4
from d5p4_lab.bench import caches


def test_puzzles_with_and_without_caches(monkeypatch):
    monkeypatch.setattr(caches, "BLOCKS", (6,))
    monkeypatch.setitem(caches.WINDOW, 4, 12)  # short and quick
    rows = caches.measure(d5p4.load("countdown", "cpu"), 4, 2)
    ways = [(row["block"], row["cache"]) for row in rows]
    assert ways == [(None, "none"), (6, "none"), (6, "prefix"), (6, "dual")]
    plain, blocks, prefix, dual = (row["tokens_run"][0] / row["rows"][0] for row in rows)
    assert plain == blocks > prefix > dual, "positions per row"
    assert ["same" in row for row in rows] == [False, False, True, True]
    lines = caches.table([{}, *rows]).splitlines()
    assert len(lines) == 2 + 4 and lines[-1].startswith("| puzzles of 4 numbers | 6 | dual |")
