import pytest
import torch

from d5p4.errors import D5P4Error
from d5p4.ops.gram import pool_gram
from d5p4.search.dpp import dpp_kernel
from d5p4_lab import baseline, bench
from d5p4_lab.paper import cost
from d5p4_lab.paper.cost import DIVERSE_BEAM, INDEPENDENT, OURS, THEIRS
from d5p4_lab.paper.rows import complete
from d5p4_lab.paper.run import reproduce
from d5p4_lab.timing import Held
from tests.lab.paper.smoke import smoke

CHANGES = {"runs": 2, "repeats": 1, "k": 3, "w": 4, "shapes": {"cpu": [8, 300, 16], "cuda": [8, 300, 16]}}


def test_peak_memory_counts_tensors_alive_at_the_same_time():
    x, cpu = torch.ones(1000), torch.device("cpu")
    with Held(cpu) as memory:
        a = x + 1  # 4000 bytes
        b = a.double()  # and 8000
        del a
        c = b.view(10, 100)[:, :50]  # no copy
        d = c * 2  # and 4000, now 12000 again
        x += 1  # nothing new
    assert memory.peak == 12_000 and memory.now == 12_000 and d.shape == (10, 50)


def test_our_step_agrees_with_the_papers():
    """Both ways choose one parent per group, ours no worse, and draw tokens with the same probabilities."""
    source = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(12, 8, 50, generator=source)
    states = torch.randn(12, 8, 16, generator=source)
    theirs, ours = cost.select_as_the_paper(logits, states, 3), cost.select_as_ours(logits, states, 3)
    assert (theirs // 4).tolist() == (ours // 4).tolist() == [0, 1, 2]
    similarity = pool_gram(states, torch.arange(12)[None]).double()
    kernel = dpp_kernel("additive", baseline.quality(logits)[None].double(), similarity, cost.BETA)[0][0]
    value = [float(torch.logdet(kernel[chosen][:, chosen])) for chosen in (theirs, ours)]
    assert value[1] >= value[0] - 1e-6

    parents, many = torch.tensor([1, 6]), 20_000
    p = logits[parents].double().softmax(-1).flatten(0, 1)
    paper, mine = cost.draw_as_the_paper(logits[parents], many).flatten(0, 1), cost.draw_as_ours(logits, parents, many)
    for drawn in (paper, mine):
        share = torch.stack([(drawn == token).double().mean(-1) for token in range(50)], -1)
        torch.testing.assert_close(share, p, atol=0.02, rtol=0)


@pytest.mark.full  # every run is a new process
@pytest.mark.timeout(600)
def test_cost(tmp_path):
    setup, summary = smoke("cost", tmp_path / "out", CHANGES, gaps="/benchmark/")
    rows = complete(setup, cost.stages(setup, "cpu"))
    assert len(rows) == 2 and list(rows[0]["stages"]) == [INDEPENDENT, DIVERSE_BEAM, THEIRS, OURS]
    pool = 12 * 8 * 300 * 8  # bytes of the pool's logits in float64
    for row in rows:
        assert row["stages"][INDEPENDENT]["gb"] == pytest.approx(2 * pool / 1e9)
        assert row["stages"][INDEPENDENT]["selection"] == 0 and row["stages"][THEIRS]["selection"] > 0
        assert row["stages"][THEIRS]["gb"] < row["stages"][INDEPENDENT]["gb"]

    rows_there = bench.rows_of(bench.read_sections(cost.RESULTS), "step")
    step = next(row for row in rows_there if row["what"] == "step, logits in memory")
    benchmark = summary["figures"]["benchmark"]
    assert benchmark[THEIRS]["after_forward"] == pytest.approx(step["baseline_ms"], rel=1e-5)
    assert benchmark[OURS]["after_forward"] == pytest.approx(step["ours_ms"], rel=1e-5)
    assert [claim["verdict"] for claim in summary["claims"] if "memory" in claim["claim"]] == ["holds", "holds"]
    with pytest.raises(D5P4Error, match="1 of 3 rows of 'runs-cpu' are missing; run --stage decode"):
        reproduce("cost", out=tmp_path / "out", stages=["draw"], changes=CHANGES | {"runs": 3})
    with pytest.raises(D5P4Error, match="needs a GPU; use --scale box"):
        reproduce("cost", scale="paper", out=tmp_path / "paper", device="cpu")
