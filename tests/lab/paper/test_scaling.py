import math

import numpy as np
import pytest
import torch

from d5p4 import PoolView
from d5p4_lab.paper.rows import complete
from d5p4_lab.paper.scaling import AUTHORS, DPPY, EMBEDDED, FREE, GRAM, PLAIN, SELECTORS, Pool, times, trials
from d5p4_lab.paper.synthetic import PoolStatistics, authors_rows, cosines, read_statistics, synthetic_rows
from tests.checkpoints import write_mdlm
from tests.lab.paper.smoke import smoke

STEP = PoolStatistics(7, 0.62, 0.03, 0.98, 0.006, tuple(i / 31 for i in range(32)), 0.8)


def synthetic_pool(statistics, k, w, source):
    quality, rows = synthetic_rows(statistics, k, w, source)
    return quality, cosines(rows)


def statistics_of(quality: torch.Tensor, similarity: torch.Tensor, w: int) -> PoolStatistics | None:
    group = torch.arange(len(quality))[None] // w
    return read_statistics(7, PoolView(group=group, tie=group, quality=quality[None], similarity=similarity[None]))


def test_statistics_by_hand():
    rows = [1.0, 0.9, 0.2, 0.4], [0.9, 1.0, 0.4, 0.6], [0.2, 0.4, 1.0, 0.7], [0.4, 0.6, 0.7, 1.0]
    similarity = torch.tensor(rows)
    statistics = statistics_of(torch.tensor([2.0, 4.0, 3.0, 6.0]), similarity, 2)
    assert statistics is not None and statistics.step == 7
    assert statistics.between == pytest.approx(0.4) and statistics.within == pytest.approx(0.8)
    assert statistics.between_spread == pytest.approx(np.std([0.2, 0.4, 0.4, 0.6] * 2, ddof=1), rel=1e-5)
    assert statistics.within_spread == pytest.approx(np.std([0.9, 0.9, 0.7, 0.7], ddof=1), rel=1e-5)
    assert statistics.quality == (0.0, 0.25, 0.5, 1.0)
    assert statistics.dimensions == pytest.approx((0.6 / statistics.between_spread) ** 2)
    # A pool of equal rows has no statistics.
    assert statistics_of(torch.zeros(4), torch.ones(4, 4), 2) is None
    assert statistics_of(torch.rand(4), torch.ones(4, 4), 2) is None


def test_random_pools_have_the_given_statistics():
    source = torch.Generator().manual_seed(0)
    made = [statistics_of(*synthetic_pool(STEP, 8, 4, source), 4) for _ in range(200)]
    for name, within in (("between", 0.01), ("between_spread", 0.003), ("within", 0.002), ("within_spread", 0.0015)):
        assert np.mean([getattr(pool, name) for pool in made]) == pytest.approx(getattr(STEP, name), abs=within), name
    assert np.mean([pool.quality_shared for pool in made]) == pytest.approx(0.8, abs=0.08)
    quality, similarity = synthetic_pool(STEP, 32, 32, source)
    assert (quality.min(), quality.max()) == (0, 1)
    assert float(torch.linalg.eigvalsh(similarity).min()) > 0


CHANGES = {"sets": 1, "k": 3, "w": 3, "length": 12, "steps": 6, "sizes": ["4x4", "4x8"]}
CHANGES |= {"trials": {"16": 3, "32": 2}, "largest": {"k-DPP sample (*)": 16, "exact": 300}}
CHANGES |= {"authors_sizes": ["4x4"], "timed_size": {"cpu": "4x4", "cuda": "4x4"}, "runs": 2, "repeats": 1}


def test_the_authors_pools():
    """Random sets of 32 rows have the log det S of the paper's table, -25.465, and siblings are no more alike."""
    source = torch.Generator().manual_seed(0)
    quality, rows = authors_rows(32, 32, source)
    similarity = cosines(rows)
    sets = [torch.randperm(1024, generator=source)[:32] for _ in range(20)]
    values = [float(torch.linalg.slogdet(similarity[at][:, at]).logabsdet) for at in sets]
    assert np.mean(values) == pytest.approx(-25.465, abs=0.1) and (quality.min(), quality.max()) == (0, 1)
    first = similarity[:32, :32][~torch.eye(32, dtype=torch.bool)]
    assert float(first.mean()) == pytest.approx(float(similarity[:32, 32:].mean()), abs=0.005)


def test_without_a_gram_matrix_diverse_beam_search_chooses_the_same_set():
    pool = Pool([], "4x4", 0, 0, 10.0, torch.device("cpu"))
    assert pool.call_of(EMBEDDED)().tolist() == pool.call_of(GRAM)().tolist()


@pytest.mark.full  # every run is a new process
@pytest.mark.timeout(600)
def test_scaling(tmp_path):
    """Better solvers must reach higher objectives."""
    model = str(write_mdlm(tmp_path / "model"))
    setup, summary = smoke("scaling", tmp_path / "out", CHANGES, model=model)
    assert summary["figures"][AUTHORS]["4×4"]["local search"]["pools"] == 3
    timed, _ = complete(setup, times(setup, "cpu"))
    assert {PLAIN, EMBEDDED, GRAM} < set(timed["ms"]) and all(ms >= 0 for ms in timed["ms"].values())
    rows = complete(setup, trials(setup))
    methods = {row["key"]: row["methods"] for row in rows}
    assert list(methods) == ["4x4 0", "4x4 1", "4x4 2", "4x8 0", "4x8 1"]
    for key, by_method in methods.items():
        small = key.startswith("4x4")
        assert set(by_method) - {DPPY} == {*SELECTORS} - (set() if small else {FREE, "exact"})
        objective = {name: values[0] for name, values in by_method.items()}
        assert objective["local search"] >= objective["greedy, k starts"]
        assert objective["full search"] >= objective["greedy, n starts"] >= objective["greedy, k starts"]
        if small:
            assert objective["exact"] >= max(value for name, value in objective.items() if "(*)" not in name)
        assert all(math.isfinite(x) for values in by_method.values() for x in values)
    assert summary["figures"]["4×4"]["local search"]["normalised"][0] > 0.9 and len(summary["claims"]) >= 6
    assert "### Against the optimum" in (setup.folder / "table.md").read_text(encoding="utf-8")
