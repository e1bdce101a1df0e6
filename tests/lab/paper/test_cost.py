import json
from pathlib import Path

import numpy as np
import pytest
import torch

from d5p4.errors import D5P4Error
from d5p4_lab import bench, timing
from d5p4_lab.paper import cost
from d5p4_lab.paper.cost_drawing import INDEPENDENT, OURS, PAPER, THEIRS
from d5p4_lab.paper.rows import complete
from d5p4_lab.paper.run import reproduce
from d5p4_lab.timing import Held, measured, one_thread, timed
from tests.lab.paper.smoke import cheap, smoke

CPU = torch.device("cpu")
CHANGES = {"repeats": 2, "k": 3, "w": 4, "length": 8, "vocabulary": 300, "width": 16}


def test_peak_memory_counts_tensors_alive_at_the_same_time():
    x = torch.ones(1000)
    with Held(CPU) as memory:
        a = x + 1  # 4000 bytes
        b = a.double()  # and 8000
        del a
        c = b.view(10, 100)[:, :50]  # no copy
        d = c * 2  # and 4000, now 12000 again
        x += 1  # nothing new
    assert memory.peak == 12_000 and memory.now == 12_000 and d.shape == (10, 50)
    with Held(CPU) as memory:
        for _ in range(5):
            y = x * 2  # the last one lives while the next is made
    assert memory.peak == 8_000 and y.shape == (1000,)


def test_times_do_not_include_waiting(monkeypatch):
    """CPU time of our own thread, which does not include waiting."""
    clock = iter([3.0, 3.25])
    with monkeypatch.context() as patch:
        patch.setattr(timing.time, "thread_time", lambda: next(clock))
        assert timed(lambda: "result", CPU) == ("result", 250)
    threads = torch.get_num_threads()
    with pytest.raises(KeyError), one_thread(CPU):
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == threads
    result, ms, gb = measured(lambda: torch.ones(250_000), CPU)
    assert result.sum() == 250_000 and ms >= 0 and gb == pytest.approx(1e-3)


def test_our_step_agrees_with_the_papers():
    """Both ways choose one parent per group, ours no worse, and draw tokens with the same probabilities."""
    source = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(12, 8, 50, generator=source)
    states = torch.randn(12, 8, 16, generator=source)
    theirs, ours = cost.select_as_the_paper(logits, states, 3), cost.select_as_ours(logits, states, 3)
    assert (theirs // 4).tolist() == (ours // 4).tolist() == [0, 1, 2]

    from d5p4.methods.dpp import dpp_kernel
    from d5p4.ops.gram import pool_gram

    p = logits.double().softmax(-1)
    score = (p * p.log()).sum(-1).mean(-1)
    quality = (score - score.min()) / (score.max() - score.min())
    kernel = dpp_kernel("additive", quality[None], pool_gram(states, torch.arange(12)[None]).double(), cost.BETA)[0][0]
    value = [float(torch.logdet(kernel[chosen][:, chosen])) for chosen in (theirs, ours)]
    assert value[1] >= value[0] - 1e-6

    parents = torch.tensor([1, 6])
    many = 20_000
    for drawn in (
        cost.draw_as_the_paper(logits[parents], many).flatten(0, 1),
        cost.draw_as_ours(logits, parents, many),
    ):
        assert drawn.shape == (16, many)
        share = torch.stack([(drawn == token).double().mean(-1) for token in range(50)], -1)
        np.testing.assert_allclose(share, p[parents].flatten(0, 1), atol=0.02)


def test_cost(tmp_path):
    setup, summary = smoke("cost", tmp_path / "out", CHANGES, gaps="/benchmark/|/machine")
    rows = complete(setup, cost.stages(setup))
    assert [row["key"] for row in rows] == ["0", "1"] and set(rows[0]["stages"]) == {INDEPENDENT, THEIRS, OURS}
    pool = 12 * 8 * 300 * 8  # bytes of the pool's logits in float64
    for row in rows:
        assert row["stages"][INDEPENDENT]["gb"] == pytest.approx(2 * pool / 1e9)
        assert row["stages"][INDEPENDENT]["selection"] == 0 and row["stages"][THEIRS]["selection"] > 0
        assert row["stages"][THEIRS]["gb"] < row["stages"][INDEPENDENT]["gb"]

    table = (setup.folder / "table.md").read_text(encoding="utf-8")
    for name, figures in PAPER.items():
        assert f"| {name}, in the paper | {figures[0]:.1f} | {figures[1]:.1f} | {figures[2]:.1f} |" in table
    committed = bench.read(cost.RESULTS)
    step = next(row for row in committed["sections"]["step"]["rows"] if row["what"] == "step, logits in memory")
    benchmark = summary["figures"]["benchmark"]
    assert benchmark[THEIRS]["after_forward"] == pytest.approx(step["baseline_ms"], rel=1e-5)
    assert benchmark[OURS]["after_forward"] == pytest.approx(step["ours_ms"], rel=1e-5)
    assert benchmark[THEIRS]["selection"] + benchmark[THEIRS]["sampling"] == pytest.approx(
        step["baseline_ms"], rel=1e-4
    )
    assert benchmark["machine"] in table and [claim["verdict"] for claim in summary["claims"]][1:] == ["holds", "holds"]
    with pytest.raises(D5P4Error, match="1 of 3 rows of 'stages' are missing; run --stage decode"):
        reproduce("cost", out=tmp_path / "out", stages=["draw"], changes=CHANGES | {"repeats": 3})


def test_a_failing_benchmark_gives_an_error(tmp_path, monkeypatch):
    def fail(words: list[str]) -> None:
        out = Path(words[words.index("--out") + 1])
        out.write_text(json.dumps({"sections": {"step": {"error": "the machine is on fire"}}}), encoding="utf-8")

    monkeypatch.setattr(cost.gpu, "main", fail)
    with pytest.raises(D5P4Error, match="the GPU benchmark failed: the machine is on fire"):
        reproduce("cost", out=tmp_path, device="cpu", changes=CHANGES | {"from_results": False})


def test_a_new_run_of_the_benchmark(tmp_path, monkeypatch):
    changes = CHANGES | {"from_results": False, "sections": ["step"]}
    with cheap():
        setup = reproduce("cost", out=tmp_path, device="cpu", changes=changes)
        [row] = complete(setup, cost.benchmark(setup))
        assert row["about"]["small"] is True and row["section"]["rows"]
        assert "CPU" in (setup.folder / "table.md").read_text(encoding="utf-8")
        monkeypatch.setattr(cost.gpu, "main", lambda words: pytest.fail("measured twice"))
        reproduce("cost", out=tmp_path, device="cpu", changes=changes, stages=["decode"])
