"""The benchmark of the solvers: its sections, its tables, and what the committed results say of the default."""

import pytest
import torch

from d5p4.errors import D5P4Error
from d5p4_lab.bench import RESULTS, read_sections, rows_of, write_sections
from d5p4_lab.bench import solver_quality as bench


def test_a_section_compares_all_solvers(monkeypatch):
    few = list(bench.pools_of(bench.LOW, 2))[4:6]
    assert len(list(bench.pools_of(bench.LOW, 1))) == len(list(bench.pools_of("kernels", 1))) == 48
    monkeypatch.setattr(bench, "pools_of", lambda section, count: iter(few))
    rows = {row["solver"]: row for row in bench.compare(bench.LOW, 2)}
    assert list(rows) == list(bench.SOLVERS)
    assert all(row["kernels"] == 4 and row["large"] == 4 for row in rows.values())
    default, paper = rows[bench.DEFAULT], rows[bench.PAPER]
    assert default["below_paper"] == paper["below_paper"] == 0 and default["time"] == 1
    assert default["mean_gap"] <= paper["mean_gap"] and default["optimal"] >= paper["optimal"]


def test_the_committed_results_say_that_the_default_is_never_below_the_papers_solver():
    results = read_sections(bench.RESULT)
    for name, count in (("kernels", 3840), (bench.LOW, 576)):
        row = next(row for row in rows_of(results, name) if row["solver"] == bench.DEFAULT)
        assert row["kernels"] == count and row["below_paper"] == 0 and row["optimal"] >= 0.99 * count


def test_tables(tmp_path, cli, fails):
    with pytest.raises(D5P4Error, match="needs CUDA"):
        bench.times(torch.device("cpu"))
    assert "no section speed" in fails("bench", "solver_quality", "--sections", "speed")
    about = {"machine": "NVIDIA H200", "torch": "2", "command": "bench"}
    times = [{"size": "6×10", "solver": name, "ms": 0.1, "graph_ms": 0.05} for name in bench.TIMED]
    out = tmp_path / "results.jsonl"
    write_sections(out, {"sections": {"times": {"about": about, "rows": times}}})
    text = cli("bench", "solver_quality", "--table", "--out", out).stdout
    assert text.count("Not measured yet.") == 2 and "| 6×10 | `full-search` | 0.1 | 0.05 | 0.018 % |" in text
    assert bench.llada_step() == next(
        row["ours_ms"]
        for row in rows_of(read_sections(RESULTS / "gpu.jsonl.xz"), "decode")
        if row["what"] == "no duplicates"
    )
