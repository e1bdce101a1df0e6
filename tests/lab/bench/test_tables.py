"""The tables of the documents are those of the committed results, and every benchmark can be called by its name."""

import pytest

from d5p4 import D5P4Error
from d5p4_lab.__main__ import BENCHES
from d5p4_lab.bench import CHECKOUT, read, read_sections, tables, write, write_sections
from d5p4_lab.tables import Table, markdown


def test_pages_have_the_tables_of_the_committed_results():
    paths = list(tables.marked_pages())
    assert CHECKOUT / "README.md" in paths
    for path in paths:
        page = path.read_text(encoding="utf-8")
        assert tables.drawn(page) == page, f"{path}: run `make tables`"
    with pytest.raises(D5P4Error, match="no command makes the table serve: none"):
        tables.drawn("<!-- serve: none -->\n<!-- end -->")


def test_every_table_can_be_drawn_without_a_page():
    pages = tables.pages()
    for marker in ("countdown: coverage-4", "rivals: countdown-5", "gpu: decode", "serve: cpu"):
        assert pages[f"<!-- {marker} -->"]().startswith("| ")


def test_a_table_escapes_its_cells():
    assert markdown(["a", "b"], [["x|y\nz", None], [1234.5, 0.12345]]).splitlines()[2:] == [
        r"| x\|y z | – |",
        "| 1234 | 0.123 |",
    ]
    assert Table("T", ["a"], [["1"]], "n").markdown() == "### T\n\n| a |\n| --- |\n| 1 |\n\nn"


def test_every_benchmark_has_a_name_and_its_own_help(cli, fails):
    for name in BENCHES:
        result = cli("bench", name, "--help")
        assert result.exit_code == 0, name
        assert f"python -m d5p4_lab bench {name} [-h]" in " ".join(result.stdout.split())
    assert "there is no benchmark 'speed'" in fails("bench", "speed")
    assert "no section bites" in fails("bench", "scale", "--sections", "bites")


def test_results_are_json_lines_and_equal_results_give_equal_bytes(tmp_path):
    first, second, rows = tmp_path / "a.jsonl.xz", tmp_path / "b.jsonl.xz", [{"method": "tree"}] * 100
    write(first, rows)
    write(second, read(first))
    assert first.read_bytes() == second.read_bytes() and read(first) == rows and first.stat().st_size < 300
    sections = {
        "base": "6×10",
        "sections": {"body": {"rows": rows, "seconds": 1.5}, "step": {"error": "no", "rows": []}},
    }
    write_sections(second, sections)
    assert read_sections(second) == sections and len(read(second)) == 103
    second.write_bytes(first.read_bytes()[:-20])
    with pytest.raises(D5P4Error, match=r"b\.jsonl\.xz is not a results file"):
        read(second)
    assert read(tmp_path / "none.jsonl.xz") == [] and read_sections(tmp_path / "none") == {"sections": {}}
