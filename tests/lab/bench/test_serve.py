"""The benchmark of the server, with a tiny model: every section gives both sides of its ratio."""

import pytest

from d5p4_lab.bench import read, serve


@pytest.mark.parametrize("sections", ["join", pytest.param(",".join(serve.TARGETS), marks=pytest.mark.full)])
def test_every_section_compares_two_sides(tmp_path, capsys, sections):
    out = tmp_path / "serve.jsonl"
    serve.main(["--small", "--device", "cpu", "--sections", sections, "--out", str(out)])
    head, *rows = read(out)
    assert [row["section"] for row in rows] == sections.split(",") and "about" in head
    assert all(row["base"] > 0 and row["ratio"] > 0 and row["requests"] > 0 for row in rows)
    printed = capsys.readouterr().out
    assert all(serve.TARGETS[row["section"]][0] in printed for row in rows)
