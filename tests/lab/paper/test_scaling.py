import itertools
import math

import numpy as np
import pytest
import torch

from d5p4.errors import D5P4Error
from d5p4.result import HistoryStep
from d5p4_lab.paper.rows import complete
from d5p4_lab.paper.run import reproduce
from d5p4_lab.paper.scaling import EXPERIMENT, SELECTORS, _steps, trials
from d5p4_lab.paper.scaling_drawing import DRAWN, METHODS, Cell, _normalised, _ranks
from d5p4_lab.paper.setup import Setup
from d5p4_lab.paper.synthetic import (
    PoolStatistics,
    parse_size,
    read_statistics,
    shared_variance,
    synthetic_pool,
    variances,
)
from tests.checkpoints import write_mdlm
from tests.lab.paper.smoke import smoke

STEP = PoolStatistics(7, 0.62, 0.03, 0.98, 0.006, tuple(i / 31 for i in range(32)), 0.8)


def history(quality: torch.Tensor, similarity: torch.Tensor, w: int) -> HistoryStep:
    nothing = torch.empty(0)
    group = torch.arange(len(quality)) // w
    return HistoryStep(7, nothing, quality, quality, similarity, group, nothing, w)


def test_statistics_by_hand():
    rows = [1.0, 0.9, 0.2, 0.4], [0.9, 1.0, 0.4, 0.6], [0.2, 0.4, 1.0, 0.7], [0.4, 0.6, 0.7, 1.0]
    similarity = torch.tensor(rows)
    statistics = read_statistics(history(torch.tensor([2.0, 4.0, 3.0, 6.0]), similarity, 2))
    assert statistics is not None and statistics.step == 7
    assert statistics.between == pytest.approx(0.4) and statistics.within == pytest.approx(0.8)
    assert statistics.between_spread == pytest.approx(np.std([0.2, 0.4, 0.4, 0.6] * 2, ddof=1), rel=1e-5)
    assert statistics.within_spread == pytest.approx(np.std([0.9, 0.9, 0.7, 0.7], ddof=1), rel=1e-5)
    assert statistics.quality == (0.0, 0.25, 0.5, 1.0)
    assert statistics.dimensions == pytest.approx((0.6 / statistics.between_spread) ** 2)
    # A pool of equal rows has no statistics.
    assert read_statistics(history(torch.zeros(4), torch.ones(4, 4), 2)) is None
    assert read_statistics(history(torch.rand(4), torch.ones(4, 4), 2)) is None


def test_shared_variance():
    assert shared_variance(torch.tensor([[1.0, 1.0], [3.0, 3.0]])) == 1
    assert shared_variance(torch.tensor([[0.0, 2.0], [0.0, 2.0]])) == 0  # negative estimates become 0
    source = torch.Generator().manual_seed(0)
    family, own = torch.randn(4000, 1, generator=source), torch.randn(4000, 4, generator=source)
    assert shared_variance(0.3**0.5 * family + 0.7**0.5 * own) == pytest.approx(0.3, abs=0.03)


def test_variances_have_the_given_dimensions():
    for dimensions in (3.0, 50.0, 1000.0):
        law = variances(dimensions)
        assert float(law.sum()) == pytest.approx(1) and bool((law > 0).all())
        assert 1 / float((law**2).sum()) == pytest.approx(dimensions, rel=1e-6)


def test_random_pools_have_the_given_statistics():
    source = torch.Generator().manual_seed(0)
    made = [read_statistics(history(*synthetic_pool(STEP, 8, 4, source), 4)) for _ in range(200)]
    for name, within in (("between", 0.01), ("between_spread", 0.003), ("within", 0.002), ("within_spread", 0.0015)):
        assert np.mean([getattr(pool, name) for pool in made]) == pytest.approx(getattr(STEP, name), abs=within), name
    assert np.mean([pool.quality_shared for pool in made]) == pytest.approx(0.8, abs=0.08)
    quality, similarity = synthetic_pool(STEP, 32, 32, source)
    assert (quality.min(), quality.max()) == (0, 1) and torch.equal(similarity.diagonal(), torch.ones(1024).double())
    assert float(torch.linalg.eigvalsh(similarity).min()) > 0
    again = [synthetic_pool(STEP, 4, 4, torch.Generator().manual_seed(5))[1] for _ in range(2)]
    assert torch.equal(*again)
    # Extreme statistics still make pools.
    for between, within, spread in itertools.product((-0.1, 0.0, 0.9999), (0.1, 0.99999), (0.0, 0.4)):
        step = PoolStatistics(0, between, spread, within, spread, (0.0, 0.0, 1.0), 1.0)
        quality, similarity = synthetic_pool(step, 4, 4, source)
        assert bool(similarity.isfinite().all()) and bool(quality.isfinite().all())


def test_normalised_and_ranks_by_hand():
    values = {"a": np.array([1.0, 2.0]), "b": np.array([3.0, 2.0]), "c": np.array([2.0, 2.0])}
    normalised = _normalised(values, ["a", "b", "c"])
    assert [normalised[name].tolist() for name in "abc"] == [[0, 1], [1, 1], [0.5, 1]]
    ranks = _ranks(values, ["a", "b", "c"])
    assert [ranks[name].tolist() for name in "abc"] == [[3, 2], [1, 2], [2, 2]]


def test_a_cell_leaves_the_optimum_out_of_ranks():
    rows = [{"methods": {"random": [1.0, -3.0, 5.0], "local search": [2.0, -2.0, 7.0], "exact": [2.5, -2.0, 9.0]}}] * 2
    cell = Cell("4x4", rows)
    assert set(cell.rank) == {"random", "local search"} and cell.rank["local search"].tolist() == [1, 1]
    assert cell.below["random"].tolist() == [1, 1] and cell.ms["exact"].tolist() == [9, 9]
    assert cell.complexity == pytest.approx(math.log(4**4)) and cell.label == "4×4"


def test_every_method_has_its_curve():
    assert set(METHODS) == set(SELECTORS)
    looks = [(look["color"], look["marker"], look["linestyle"]) for look in DRAWN.values()]
    assert len(set(looks)) == len(looks)
    for scale in EXPERIMENT.settings.values():
        assert set(scale["largest"]) <= set(SELECTORS)
        assert all(parse_size(size) for size in scale["sizes"])


def test_wrong_sizes_are_refused():
    for size in ("8", "8x", "8×4", "x", "1x4", "4x1", "8x4x2"):
        with pytest.raises(D5P4Error, match="size"):
            parse_size(size)


CHANGES = {"sets": 1, "k": 3, "w": 3, "length": 12, "steps": 6, "sizes": ["4x4", "4x8"], "batch": 2}
CHANGES |= {"trials": {"16": 3, "32": 2}, "largest": {"k-DPP sample (*)": 16, "exact": 300}}


def test_scaling(tmp_path):
    """Better solvers must reach higher objectives."""
    model = str(write_mdlm(tmp_path / "model"))
    with pytest.raises(D5P4Error, match="1 of 1 rows of 'statistics' are missing; run --stage decode"):
        _steps(Setup(EXPERIMENT, "box", tmp_path / "out", model, changes=CHANGES))
    setup, summary = smoke("scaling", tmp_path / "out", CHANGES, model=model, gaps="/exact/")
    rows = complete(setup, trials(setup))
    methods = {row["key"]: row["methods"] for row in rows if "methods" in row}
    assert list(methods) == ["4x4 0", "4x4 1", "4x4 2", "4x8 0", "4x8 1"]
    for key, by_method in methods.items():
        small = key.startswith("4x4")
        assert set(by_method) == set(SELECTORS) - (set() if small else {"k-DPP sample (*)", "exact"})
        objective = {name: values[0] for name, values in by_method.items()}
        assert objective["local search"] >= objective["greedy, k starts"] - 1e-9
        assert objective["greedy, n starts"] >= objective["greedy, k starts"] - 1e-9
        if small:
            others = [value for name, value in objective.items() if name != "k-DPP sample (*)"]
            assert objective["exact"] >= max(others) - 1e-9
        assert all(math.isfinite(x) for values in by_method.values() for x in values)
    assert {row["size"] for row in rows if "each_ms" in row} == {"4x4", "4x8"}
    assert summary["figures"]["4×4"]["local search"]["normalised"][0] > 0.9 and len(summary["claims"]) >= 6
    assert "### Against the optimum" in (setup.folder / "table.md").read_text(encoding="utf-8")
    with pytest.raises(D5P4Error, match="trials.jsonl.xz was made with other settings: betas was"):
        reproduce("scaling", out=tmp_path / "out", model=model, device="cpu", changes=CHANGES | {"betas": [2.0]})
