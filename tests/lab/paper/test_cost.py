from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from d5p4.decode.beams import ALONE, Beams
from d5p4.distributed import connect
from d5p4.errors import D5P4Error
from d5p4_lab import baseline, bench
from d5p4_lab.paper import cost
from d5p4_lab.paper.cost import DIVERSE_BEAM, INDEPENDENT, OURS, PAPER, THEIRS
from d5p4_lab.paper.rows import complete
from d5p4_lab.paper.run import reproduce
from d5p4_lab.timing import Held
from tests.distributed.ranks import results
from tests.lab.paper.smoke import smoke

CPU = torch.device("cpu")
SHAPE = cost.Shape(3, 4, 8, 300, 16)
CHANGES = {"repeats": 2, "k": 3, "w": 4, "shapes": {"cpu": [8, 300, 16], "cuda": [8, 300, 16]}}
WAYS = [INDEPENDENT, DIVERSE_BEAM, THEIRS, OURS]


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


def whole_pool() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and features of the pool of two ranks."""
    source = torch.Generator().manual_seed(1)
    return 3 * torch.randn(24, 8, 50, generator=source), torch.randn(24, 8, 16, generator=source)


def selected(logits: torch.Tensor, states: torch.Tensor, beams: Beams) -> list[list[int]]:
    """The parents that each way selects in a pool of six groups."""
    ways = cost.select_as_the_paper, partial(baseline.select_diverse_beam, alpha=10.0), cost.select_as_ours
    return [way(logits, states, 6, beams=beams).tolist() for way in ways]


def on_a_rank() -> dict[str, Any]:
    """Select from a pool of which this rank has its half, then measure every way."""
    with connect((1, 2), timeout=60, device="cpu") as mesh:
        half = slice(12 * mesh.rank, 12 * mesh.rank + 12)
        parents = selected(*(x[half] for x in whole_pool()), mesh.beams)
        return {"parents": parents, "measured": cost.measure(SHAPE, CPU, 0, mesh.beams)}


def test_two_ranks_share_a_pool(tmp_path):
    """Ranks that exchange scores and features select the parents that one process selects from the whole pool."""
    alone = selected(*whole_pool(), ALONE)
    ended = results("tests.lab.paper.test_cost:on_a_rank", 2, tmp_path)
    assert [rank["parents"] for rank in ended] == [alone, alone]
    assert all([parent // 4 for parent in parents] == list(range(6)) for parents in alone)
    assert ended[0]["measured"] == ended[1]["measured"]  # the figures of the slowest rank
    assert list(ended[0]["measured"]) == WAYS and ended[0]["measured"][THEIRS]["selection"] > 0


def test_cost(tmp_path):
    setup, summary = smoke("cost", tmp_path / "out", CHANGES, gaps="/benchmark/")
    rows = complete(setup, cost.stages(setup, "cpu"))
    assert [row["key"] for row in rows] == ["0", "1"] and list(rows[0]["stages"]) == WAYS
    pool = 12 * 8 * 300 * 8  # bytes of the pool's logits in float64
    for row in rows:
        assert row["stages"][INDEPENDENT]["gb"] == pytest.approx(2 * pool / 1e9)
        assert row["stages"][INDEPENDENT]["selection"] == 0 and row["stages"][THEIRS]["selection"] > 0
        assert row["stages"][THEIRS]["gb"] < row["stages"][INDEPENDENT]["gb"]

    table = (setup.folder / "table.md").read_text(encoding="utf-8")
    for name, figures in PAPER.items():
        assert f"| {name}, in the paper | {figures[0]:.1f} | {figures[1]:.1f} | {figures[2]:.1f} |" in table
    rows_there = bench.rows_of(bench.read_sections(cost.RESULTS), "step")
    step = next(row for row in rows_there if row["what"] == "step, logits in memory")
    benchmark = summary["figures"]["benchmark"]
    assert benchmark[THEIRS]["after_forward"] == pytest.approx(step["baseline_ms"], rel=1e-5)
    assert benchmark[OURS]["after_forward"] == pytest.approx(step["ours_ms"], rel=1e-5)
    assert benchmark["machine"] in table
    notes = [claim["note"] for claim in summary["claims"]]
    assert sum("measured on one CPU thread, 3×4, L 8, V 300, D 16" in note for note in notes) == 3
    assert [claim["verdict"] for claim in summary["claims"] if "memory" in claim["claim"]] == ["holds", "holds"]
    with pytest.raises(D5P4Error, match="1 of 3 rows of 'stages' are missing; run --stage decode"):
        reproduce("cost", out=tmp_path / "out", stages=["draw"], changes=CHANGES | {"repeats": 3})
