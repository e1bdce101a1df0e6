"""The small models of the box: the same problems for all methods, differences problem by problem."""

import numpy as np
import pytest

from d5p4_lab.bench import box, read


def test_every_method_gets_the_same_problems(tmp_path, capsys):
    out = tmp_path / "box.jsonl"
    box.main(["--task", "programs", "--count", "3", "--out", str(out), "--device", "cpu"])
    rows = read(out)
    assert [row["method"] for row in rows] == list(box.PUZZLES["programs"])
    assert all(np.shape(row["right"]) == (3, 4) and len(row["rows"]) == 3 for row in rows)
    assert "| programs | 3 | independent |" in capsys.readouterr().out


def test_differences_are_paired():
    """A method that solves one problem more than the tree on problems of very different difficulty."""
    draw = np.random.default_rng(0)
    today = (draw.random((400, 1)) < 0.5).astype(int).repeat(4, 1)
    better = today.copy()
    better[np.flatnonzero(today[:, 0] == 0)[:20], 2] = 1
    facts = {"task": "countdown", "different": [1] * 400, "rows": [8] * 400}
    named = {"tree, K = 8 (today's)": today, "wide": better}
    results = [facts | {"method": name, "right": right.tolist()} for name, right in named.items()]
    tree, wide = box.tables(results)["puzzles"]().splitlines()[2:]
    assert "| 0.0 ± 0.0 |" in tree
    gain, half = (float(x) for x in wide.split("|")[5].split("±"))
    assert gain == 5.0 and 1 < half < 3

    books = {"task": "books", "method": "independent", "rows": [100, 200], "difference": [0.5, 0.7]}
    line = box.tables([books | {"nats": [30.0, 10.0], "bytes": [20, 20]}])["books"]().splitlines()[2]
    assert line.startswith("| independent | 2 | 1.000 [") and line.endswith("| 150 |")
    assert box.tables([])["puzzles"]().count("\n") == 1


@pytest.mark.full
def test_texts_of_books_are_judged(tmp_path, capsys):
    box.main(["--task", "books", "--count", "8", "--out", str(tmp_path / "box.jsonl"), "--device", "cpu"])
    rows = read(tmp_path / "box.jsonl")
    assert [row["method"] for row in rows] == list(box.BOOKS) and "nats per byte" in capsys.readouterr().out
    assert all(len(row["nats"]) == 2 and min(row["bytes"]) > 100 for row in rows)
