"""The tables of the documents are those of the committed results, and every benchmark can be called by its name."""

import re

import pytest

from d5p4 import D5P4Error
from d5p4_lab.__main__ import BENCHES
from d5p4_lab.bench import CHECKOUT, fill, read, tables, write

SLOW = ("simulation", "few")  # simulations of whole files


def check_pages(leave):
    left = {}
    for path, kind, drawn in tables.pages():
        page = (CHECKOUT / path).read_text(encoding="utf-8")
        names = re.findall(rf"<!-- {kind}: ([\w-]+) -->", page)
        assert names and set(names) <= set(drawn), (path, kind)
        assert fill(page, kind, drawn, leave) == page, f"{path}: run `make tables`"
        left.setdefault(path, re.sub(r"<!-- end -->", "", page))
        left[path] = re.sub(rf"<!-- {kind}: [\w-]+ -->", "", left[path])
    for path, rest in left.items():
        assert not re.findall(r"<!-- \w+: [\w-]+ -->", rest), f"{path} has a table that no command makes"


def test_pages_have_the_tables_of_the_committed_results():
    check_pages(SLOW)


@pytest.mark.full
def test_the_simulation_gives_the_tables_of_the_page():
    check_pages(())


def test_every_benchmark_has_a_name_and_its_own_help(cli, fails):
    for name in BENCHES:
        result = cli("bench", name, "--help")
        assert result.exit_code == 0, name
        assert f"python -m d5p4_lab bench {name} [-h]" in " ".join(result.stdout.split())
    assert "there is no benchmark 'speed'" in fails("bench", "speed")
    assert "no section bites" in fails("bench", "scale", "--sections", "bites")


def test_results_are_compressed_and_equal_results_give_equal_bytes(tmp_path):
    first, second, results = tmp_path / "a.json.xz", tmp_path / "b.json.xz", {"rows": [{"method": "tree"}] * 100}
    write(first, results)
    write(second, read(first))
    assert first.read_bytes() == second.read_bytes() and read(first) == results and first.stat().st_size < 300
    second.write_bytes(first.read_bytes()[:-20])
    with pytest.raises(D5P4Error, match=r"b\.json\.xz is not a results file"):
        read(second)
