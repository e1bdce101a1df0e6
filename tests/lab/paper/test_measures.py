import importlib.util
import itertools

import numpy as np
import pytest
import torch

from d5p4 import D5P4Error
from d5p4_lab.paper.measures import (
    MIXTURES,
    STAR,
    Clusters,
    cluster,
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


def sample(random, n, shares=None):
    """[n, D] features around KINDS directions; `shares` are their probabilities."""
    places = np.random.default_rng(99).normal(size=(KINDS, WIDTH))
    return places[random.choice(KINDS, size=n, p=shares)] + 0.3 * random.normal(size=(n, WIDTH))


@pytest.fixture
def random():
    return np.random.default_rng(0)


def slowly(p, q, scaling=5.0):
    """The definition, point by point: both integrations over sorted points, as trapezoids."""

    def divergence(a, r):
        return sum(x * np.log(x / y) for x, y in zip(a, r, strict=True) if x > 0)

    p, q = np.array(p) / np.sum(p), np.array(q) / np.sum(q)
    curve = [(1.0, 0.0), (0.0, 1.0)]
    for w in MIXTURES:
        r = w * p + (1 - w) * q
        curve.append((np.exp(-scaling * divergence(q, r)), np.exp(-scaling * divergence(p, r))))

    def integral(points):
        return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in zip(points[:-1], points[1:], strict=True))

    over_x = integral(sorted(curve, key=lambda point: (point[0], -point[1])))
    over_y = integral(sorted(((y, x) for x, y in curve), key=lambda point: (point[0], -point[1])))
    return (over_x + over_y) / 2


# the formula


HISTOGRAMS = [
    ([3, 5, 2], [1, 1, 8]),
    ([0.5, 0.5, 0, 0], [0, 0.25, 0.25, 0.5]),
    ([10, 0, 0, 3], [0, 7, 0, 1]),
    ([1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]),
    (list(range(1, 60)), [1] * 59),
]


def test_the_area_is_the_mean_of_both_integrations():
    for (p, q), smoothing in itertools.product(HISTOGRAMS, (0.0, STAR)):
        value = mauve(p, q, smoothing)
        assert value == pytest.approx(slowly(np.add(p, smoothing), np.add(q, smoothing)), abs=1e-9), (p, q)
        assert value == pytest.approx(mauve(q, p, smoothing), abs=1e-9), (p, q)
        assert 0 < value < 1


def test_ends_of_the_scale():
    assert mauve([2, 3], [20, 30]) == pytest.approx(1, abs=1e-12)
    apart = mauve([1, 0], [0, 1])
    # Points (exp(5 log(1-w)), exp(5 log w)): the area under y = (1 - x^0.2)^5 is B(5, 6) · 5 = 1/252.
    assert apart == pytest.approx(1 / 252, abs=2e-4)
    assert mauve([1, 0], [0, 1], STAR) > apart


# from features


def test_clusters_are_the_kinds_and_do_not_depend_on_length(random):
    places = np.eye(4)[[0, 0, 1, 2, 2, 2, 3]]
    noise = 1e-3 * random.normal(size=(14, 4))
    clusters = cluster(places + noise[:7], 5 * places[::-1] + noise[7:], clusters=4)  # rows of another length
    together = np.concatenate([clusters.p, clusters.q[::-1]])
    kinds = np.tile([0, 0, 1, 2, 2, 2, 3], 2)
    assert ((together[:, None] == together) == (kinds[:, None] == kinds)).all()
    assert sorted(np.bincount(clusters.p)) == sorted(np.bincount(clusters.q)) == [1, 1, 2, 3]


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
    ours = cluster(p, q, clusters=KINDS)
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


EQUAL, UNEQUAL = np.full(KINDS, 1 / KINDS), np.array([0.35, 0.25, 0.1, 0.1, 0.1, 0.1])
FARTHER = np.array([0.45, 0.25, 0.1, 0.1, 0.05, 0.05])


def spread_and_interval(random, *shares, repeats=200):
    """Differences of two cases [repeats] and their intervals [repeats, 2], over fresh texts."""
    made = []
    for _ in range(repeats):
        clusters, groups = labelled(random, *shares)
        (figure,) = contrasts(mauve_samples(clusters, draws=150, **groups), [[1, -1]])
        made.append((figure.value, figure.low, figure.high))
    return np.array(made)


@pytest.mark.parametrize(
    "shares", [(UNEQUAL, UNEQUAL[::-1]), pytest.param((UNEQUAL, FARTHER), marks=pytest.mark.full)], ids=["equal", "not"]
)
def test_intervals_of_differences_cover(random, shares):
    """The truth is the mean difference over fresh samples of this size."""
    made = spread_and_interval(random, *shares)
    truth = made[:, 0].mean()
    assert 0.92 <= np.mean((made[:, 1] <= truth) & (truth <= made[:, 2])) <= 0.98


def test_texts_drawn_together_are_resampled_together(random):
    p = sample(random, 120)
    q = np.repeat(sample(random, 30), 4, axis=0)  # thirty sets of four equal texts
    clusters = [[cluster(p, q)]]
    alone = mauve_samples(clusters)
    together = mauve_samples(clusters, q_groups=np.arange(30).repeat(4).tolist())
    assert together.values == alone.values
    assert (together.units, alone.units) == (30, 120)
    assert together.resampled.std() > 1.2 * alone.resampled.std()


def test_clusters_that_all_cases_share(random):
    p, cases = sample(random, 80), [sample(random, 80), sample(random, 80) + 1, sample(random, 80)]
    shared = common_clusters(p, cases, seed=3)
    assert all(np.array_equal(one.p, shared[0].p) and one.number == 8 for one in shared)
    assert [len(one.q) for one in shared] == [80, 80, 80]
    one = common_clusters(p, cases[:1], seed=3)[0]
    alone = cluster(p, cases[0], seed=3)
    assert np.array_equal(one.p, alone.p) and np.array_equal(one.q, alone.q)  # one case: the clusters of the pair


# features of texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_judge(tmp_path_factory.mktemp("judge"))


def last_state(judge, ids):
    """One text by itself, through the whole model and all its layers."""
    with torch.no_grad():
        out = judge.model(input_ids=torch.tensor([ids]), output_hidden_states=True)
    return out.hidden_states[-1][0, -1].numpy()


@pytest.mark.parametrize("start", ["<s>", ""])
def test_a_feature_is_the_state_of_the_last_token(folder, start):
    judge = CausalJudge(folder, device="cpu", dtype="float64", start=start)
    texts = [text for text in TEXTS if text]
    before = [judge.start_id] if start else []
    wanted = [last_state(judge, before + judge.tokens(text)[0]) for text in texts]
    for sizes in ({}, {"max_tokens_per_batch": 1}, {"max_tokens_per_batch": 20}):
        features = last_token_features(judge, texts, **sizes)
        assert features.dtype == np.float32 and features.shape == (len(texts), 16)
        np.testing.assert_allclose(features, wanted, rtol=0, atol=1e-6)


def test_an_empty_text_is_the_start_token_or_an_error(folder):
    judge = CausalJudge(folder, device="cpu", start="<s>")
    np.testing.assert_allclose(last_token_features(judge, ["a", ""])[1], last_state(judge, [judge.start_id]), atol=1e-6)
    with pytest.raises(D5P4Error, match="text 1 is empty"):
        last_token_features(CausalJudge(folder, device="cpu", start=""), ["a", ""])
    assert last_token_features(judge, []).shape == (0, 16)
    with pytest.raises(D5P4Error, match="max_tokens=0"):
        last_token_features(judge, ["a"], max_tokens=0)


# ---- CKA


def by_hsic(x, y):
    """CKA as a ratio of HSIC = tr(K H M H) / (n - 1)², with the centring matrix H = I - 1/n."""
    n = len(x)
    h = np.eye(n) - np.full((n, n), 1 / n)

    def hsic(k, m):
        return np.trace(k @ h @ m @ h) / (n - 1) ** 2

    k, m = x @ x.T, y @ y.T
    return hsic(k, m) / np.sqrt(hsic(k, k) * hsic(m, m))


def by_features(x, y):
    """CKA without Gram matrices: ‖YᵀX‖² / (‖XᵀX‖ ‖YᵀY‖) of centred columns."""
    x, y = x - x.mean(0), y - y.mean(0)
    return np.linalg.norm(y.T @ x) ** 2 / (np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y))


def test_cka_is_what_other_formulas_say(random):
    for n, d, e in ((2, 1, 1), (5, 3, 7), (40, 8, 8), (64, 100, 5)):
        x = random.normal(size=(n, d)) + 3
        y = random.normal(size=(n, e)) + x[:, :1]
        assert linear_cka(x, y) == pytest.approx(by_hsic(x, y), abs=1e-10), (n, d, e)
        assert linear_cka(x, y) == pytest.approx(by_features(x, y), abs=1e-10), (n, d, e)
        assert linear_cka(x, y) == pytest.approx(linear_cka(y, x), abs=1e-12), (n, d, e)


def test_cka_does_not_see_rotation_scale_or_place(random):
    x, y = random.normal(size=(20, 6)), random.normal(size=(20, 4))
    turn, _ = np.linalg.qr(random.normal(size=(6, 6)))
    for other in (x @ turn, 1e-8 * x, -1e8 * x, x + 100.0, 3e-3 * x @ turn - 5):
        assert linear_cka(other, y) == pytest.approx(linear_cka(x, y), abs=1e-9)
        assert linear_cka(x, other) == pytest.approx(1, abs=1e-9)
    stretched = x @ np.diag([10, 1, 1, 1, 1, 1])
    assert abs(linear_cka(stretched, y) - linear_cka(x, y)) > 1e-3  # it does see what is no rotation
