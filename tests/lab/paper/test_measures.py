import importlib.util
import itertools

import numpy as np
import pytest
import torch

from d5p4_lab.paper.measures import (
    MIXTURES,
    STAR,
    Clusters,
    common_clusters,
    contrasts,
    last_token_features,
    linear_cka,
    mauve,
    mauve_samples,
)
from d5p4_lab.scoring.perplexity import CausalJudge
from tests.lab.scoring.test_perplexity import TEXTS, write_judge

needs_mauve_text = pytest.mark.skipif(importlib.util.find_spec("mauve") is None, reason="mauve-text is not installed")
KINDS, WIDTH = 6, 24


@pytest.fixture
def random():
    return np.random.default_rng(0)


def slowly(p, q, scaling=5.0):
    """The definition, point by point: the area under the curve, as trapezoids over sorted points."""

    def divergence(a, r):
        return sum(x * np.log(x / y) for x, y in zip(a, r, strict=True) if x > 0)

    p, q = np.array(p) / np.sum(p), np.array(q) / np.sum(q)
    curve = [(1.0, 0.0), (0.0, 1.0)]
    for w in MIXTURES:
        r = w * p + (1 - w) * q
        curve.append((np.exp(-scaling * divergence(q, r)), np.exp(-scaling * divergence(p, r))))
    points = sorted(curve, key=lambda point: (point[0], -point[1]))
    return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in zip(points[:-1], points[1:], strict=True))


# the formula


HISTOGRAMS = [
    ([3, 5, 2], [1, 1, 8]),
    ([0.5, 0.5, 0, 0], [0, 0.25, 0.25, 0.5]),
    ([10, 0, 0, 3], [0, 7, 0, 1]),
    ([1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]),
    (list(range(1, 60)), [1] * 59),
]


def test_the_area_is_that_of_the_definition():
    for (p, q), smoothing in itertools.product(HISTOGRAMS, (0.0, STAR)):
        value = mauve(p, q, smoothing)
        assert value == pytest.approx(slowly(np.add(p, smoothing), np.add(q, smoothing)), abs=1e-9), (p, q)
        assert value == pytest.approx(mauve(q, p, smoothing), abs=1e-9), (p, q)
        assert 0 < value < 1


# from features


@needs_mauve_text
def test_texts_of_few_kinds_give_what_mauve_text_gives(random):
    """As many clusters as kinds: both k-means find the same ones, and nothing is left to chance."""
    from mauve import compute_mauve

    places = np.eye(KINDS, WIDTH)
    p, q = (
        places[random.choice(KINDS, size=n, p=shares)] + 1e-3 * random.normal(size=(n, WIDTH))
        for n, shares in ((240, None), (300, [0.4, 0.2, 0.1, 0.1, 0.1, 0.1]))
    )
    theirs = compute_mauve(p_features=p, q_features=q, num_buckets=KINDS, kmeans_num_redo=20)
    (ours,) = common_clusters(p, [q], clusters=KINDS)
    histograms = np.bincount(ours.p, minlength=KINDS), np.bincount(ours.q, minlength=KINDS)
    assert sorted(np.rint(theirs.p_hist * 240)) == sorted(histograms[0])
    assert mauve(*histograms) == pytest.approx(theirs.mauve, abs=1e-6)
    assert mauve(*histograms, STAR) == pytest.approx(theirs.mauve_star, abs=1e-6)


# what chance does


def labelled(random, *shares, texts=8, sets=40, documents=20):
    """Clusters of references and of cases, without k-means: each set or document prefers some kinds by chance."""

    def side(units, share):
        own = random.dirichlet(40 * np.asarray(share), size=units)
        return np.concatenate([random.choice(KINDS, size=texts, p=row) for row in own])

    references = side(documents, np.full(KINDS, 1 / KINDS))
    cases = [Clusters(references, side(sets, share), KINDS) for share in shares]
    groups = {name: np.arange(n).repeat(texts).tolist() for name, n in (("p_groups", documents), ("q_groups", sets))}
    return [cases], groups


UNEQUAL = np.array([0.35, 0.25, 0.1, 0.1, 0.1, 0.1])


@pytest.mark.full
def test_intervals_of_differences_cover(random):
    """The truth is the mean difference of two cases over fresh samples of this size."""
    made = []
    for _ in range(200):
        clusters, groups = labelled(random, UNEQUAL, UNEQUAL[::-1])
        (figure,) = contrasts(mauve_samples(clusters, draws=150, **groups), [[1, -1]])
        made.append((figure.value, figure.low, figure.high))
    values, low, high = np.array(made).T
    assert 0.92 <= np.mean((low <= values.mean()) & (values.mean() <= high)) <= 0.98


# features of texts


def last_state(judge, ids):
    """One text by itself, through the whole model and all its layers."""
    with torch.no_grad():
        out = judge.model(input_ids=torch.tensor([ids]), output_hidden_states=True)
    return out.hidden_states[-1][0, -1].numpy()


def test_a_feature_is_the_state_of_the_last_token(tmp_path):
    judge = CausalJudge(write_judge(tmp_path), device="cpu", dtype="float64", start="")
    texts = [text for text in TEXTS if text]
    wanted = [last_state(judge, judge.tokens(text)[0]) for text in texts]
    for sizes in ({}, {"max_tokens_per_batch": 1}, {"max_tokens_per_batch": 20}):
        features = last_token_features(judge, texts, **sizes)
        assert features.dtype == np.float32 and features.shape == (len(texts), 16)
        np.testing.assert_allclose(features, wanted, rtol=0, atol=1e-6)


# ---- CKA


def by_hsic(x, y):
    """CKA as a ratio of HSIC = tr(K H M H) / (n - 1)², with the centring matrix H = I - 1/n."""
    n = len(x)
    h = np.eye(n) - np.full((n, n), 1 / n)

    def hsic(k, m):
        return np.trace(k @ h @ m @ h) / (n - 1) ** 2

    k, m = x @ x.T, y @ y.T
    return hsic(k, m) / np.sqrt(hsic(k, k) * hsic(m, m))


def test_cka_is_what_other_formulas_say(random):
    for n, d, e in ((2, 1, 1), (5, 3, 7), (40, 8, 8), (64, 100, 5)):
        x = random.normal(size=(n, d)) + 3
        y = random.normal(size=(n, e)) + x[:, :1]
        assert linear_cka(x, y) == pytest.approx(by_hsic(x, y), abs=1e-10), (n, d, e)
        turn, _ = np.linalg.qr(random.normal(size=(d, d)))
        assert linear_cka(1e-8 * x @ turn + 5, y) == pytest.approx(linear_cka(x, y), abs=1e-6), (n, d, e)
        assert linear_cka(x, y) == pytest.approx(linear_cka(y, x), abs=1e-12), (n, d, e)
