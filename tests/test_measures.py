import itertools
import math

import pytest
import torch

from d5p4.decode.measures import fill_finished, mean_score, normalise, pooled_features, position_values, similarity
from d5p4.types import Head


@pytest.fixture
def scene():
    g = torch.Generator().manual_seed(0)
    head = Head(torch.randn(9, 5, generator=g, dtype=torch.float64), None, torch.arange(9) == 8)
    states = torch.randn(4, 6, 5, generator=g, dtype=torch.float64)
    tokens = torch.randint(0, 8, (4, 6), generator=g)
    masked = torch.rand(4, 6, generator=g) < 0.5
    masked[3] = False
    p = torch.softmax((states @ head.weight.T)[..., :8], -1)
    return head, states, tokens.masked_fill(masked, 8), masked, p


@pytest.mark.parametrize("positions, carry_over", [*itertools.product(("all", "masked"), (False, True))])
@pytest.mark.parametrize("kind", ("entropy", "self-certainty", "logprob"))
def test_scores_against_their_formulas(scene, kind, positions, carry_over):
    head, states, tokens, masked, p = scene
    values, _ = position_values(kind, states, tokens, masked, head, carry_over)
    score = mean_score(kind, positions, values, masked, carry_over)
    for row in range(4):
        expected = []
        for j in range(6):
            hidden = bool(masked[row, j])
            if positions == "masked" and not hidden or kind == "self-certainty" and carry_over and not hidden:
                continue
            q = p[row, j]
            if carry_over and not hidden:
                expected.append(0.0)
            elif kind == "entropy":
                expected.append(float((q * q.log()).sum()))
            elif kind == "self-certainty":
                expected.append(float(-q.log().mean()))
            else:
                expected.append(float(q.max().log() if hidden else q[tokens[row, j]].log()))
        if expected:
            assert score[row].item() == pytest.approx(sum(expected) / len(expected), abs=1e-12)
        else:
            assert score[row].isnan() if kind == "self-certainty" else score[row] == 0


def test_normalised_scores():
    raw = torch.tensor([[-3.0, -1.0, -2.0], [-2.0, -2.0 - 1e-9, -2.0]], dtype=torch.float64)
    assert normalise(raw, "minmax", "entropy", 9).tolist() == [[0.0, 1.0, 0.5], [0.0, 0.0, 0.0]]  # no rounding noise
    spread = raw[0].std(correction=0).item()
    assert normalise(raw, "zscore", "entropy", 9)[0].tolist() == pytest.approx([0, 2 / spread, 1 / spread])
    for kind, values, wanted in (  # whatever the pool
        ("entropy", [-math.log(8), -math.log(8) / 2, 0.0], [0, 0.5, 1]),
        ("logprob", [math.log(0.25)], [0.25]),
        ("self-certainty", [math.log(8)], [0]),
    ):
        q = normalise(torch.tensor([values], dtype=torch.float64), "absolute", kind, 8)
        assert q[0].tolist() == pytest.approx(wanted, abs=1e-9)


def test_finished_rows_are_as_certain_as_the_surest():
    raw = torch.tensor([[1.0, math.nan, 3.0], [math.nan, math.nan, math.nan]])
    assert fill_finished(raw).tolist() == [[1, 3, 3], [0, 0, 0]]


def test_pooling():
    g = torch.Generator().manual_seed(0)
    features = torch.randn(2, 3, 4, 5, generator=g, dtype=torch.float64)
    masked = torch.rand(2, 3, 4, generator=g) < 0.5
    masked[..., 0], masked[..., 1] = True, False
    slot = torch.arange(6).view(2, 3)
    for pooling in ("flatten", "mean", "masked", "non-masked"):
        pooled = pooled_features(features.flatten(0, 1), masked.flatten(0, 1), pooling)
        cosine, rbf = similarity(pooled, slot, "cosine", 1.0), similarity(pooled, slot, "rbf", 0.7)
        for p in range(2):
            rows = []
            for n in range(3):
                keep = {"mean": masked[p, n] | True, "masked": masked[p, n], "non-masked": ~masked[p, n]}.get(pooling)
                rows.append(features[p, n].flatten() if keep is None else features[p, n][keep].mean(0))
            unit = torch.nn.functional.normalize(torch.stack(rows), dim=-1)
            torch.testing.assert_close(cosine[p], unit @ unit.T, atol=1e-12, rtol=0, msg=pooling)
            expected = torch.exp(-0.7 * torch.cdist(unit, unit) ** 2)
            torch.testing.assert_close(rbf[p], expected, atol=1e-12, rtol=0, msg=pooling)
