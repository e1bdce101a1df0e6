"""Measures that only the paper's tables need: MAUVE of two samples of texts, and linear CKA of two sets of vectors.

MAUVE (Pillutla et al., 2021; JMLR 2023) compares references with generated texts. All texts are put into common
clusters by their features. Let p be the histogram of references over these clusters, and q the histogram of
generated texts. MAUVE is the area under the curve of

    (exp(-c KL(q || r)), exp(-c KL(p || r))),  r = w p + (1 - w) q,  w from 0 to 1.

MAUVE is 1 for equal histograms and near 0 for histograms without a common cluster. MAUVE* smooths the histograms first
(`smoothing=STAR`). Fewer texts make MAUVE and MAUVE* smaller, so compare only values from the same numbers of texts.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from d5p4.errors import D5P4Error
from d5p4.eval.encoder import float_rows
from d5p4.eval.perplexity import CausalJudge
from d5p4.eval.reading import batches, padded, strings
from d5p4.options import whole

from ..statistics import DRAWS, Figure

Floats = NDArray[np.float64]
STAR = 0.5  # MAUVE* adds this number to every count, as the estimator of Krichevsky and Trofimov does
SCALING = 5.0  # c in the formula above
MIXTURES = np.linspace(1e-6, 1 - 1e-6, 25)
VARIANCE = 0.9  # the share of the variance that the principal components keep
SEED, RESTARTS, ITERATIONS = 25, 5, 500


class Clusters(NamedTuple):
    """The cluster, from 0 to `number` - 1, of each reference (p [n_p]) and of each generated text (q [n_q])."""

    p: NDArray[np.int64]
    q: NDArray[np.int64]
    number: int

    @property
    def histograms(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Two arrays [number]: how many references, and how many generated texts, are in each cluster."""
        return np.bincount(self.p, minlength=self.number), np.bincount(self.q, minlength=self.number)


class MauveInterval(NamedTuple):
    """A value of MAUVE, and how much this value varies by chance."""

    figure: Figure  # the value for the first seed of k-means, and an interval from resampled texts in the same clusters
    seeds: Floats  # the values of MAUVE [S], one per seed of k-means


def mauve(
    p_features: ArrayLike,
    q_features: ArrayLike,
    *,
    smoothing: float = 0.0,
    clusters: int | None = None,
    seed: int = SEED,
    scaling: float = SCALING,
) -> float:
    """Return MAUVE (0 to 1) of references with features [n_p, D] and generated texts with features [n_q, D].

    smoothing  is added to every count of both histograms: 0 for MAUVE, STAR for MAUVE*
    clusters   the number of clusters; by default a tenth of the number of texts in the smaller sample, but at least 2
    """
    histograms = cluster(p_features, q_features, clusters=clusters, seed=seed).histograms
    return mauve_from_histograms(*histograms, smoothing=smoothing, scaling=scaling)


def mauve_from_histograms(p: ArrayLike, q: ArrayLike, *, smoothing: float = 0.0, scaling: float = SCALING) -> float:
    """Return MAUVE of two histograms [K] of counts or shares. `smoothing` is added to every entry."""
    pair = np.asarray(p, dtype=np.float64), np.asarray(q, dtype=np.float64)
    if pair[0].ndim != 1 or pair[0].shape != pair[1].shape:
        raise D5P4Error(
            f"p and q must be histograms over the same bins, but have shapes {pair[0].shape} and {pair[1].shape}"
        )
    for name, counts in zip("pq", pair, strict=True):
        if not (np.isfinite(counts).all() and (counts >= 0).all() and counts.sum() > 0):
            raise D5P4Error(f"the histogram {name} must have finite entries of at least 0, and at least one above 0")
    _at_least("smoothing", smoothing, 0)
    _at_least("scaling", scaling, 0)
    return float(_area(*pair, smoothing, scaling))


def cluster(p_features: ArrayLike, q_features: ArrayLike, *, clusters: int | None = None, seed: int = SEED) -> Clusters:
    """Put references with features [n_p, D] and generated texts with features [n_q, D] into common clusters.

    All rows of features are scaled to length 1 and projected on the first principal components, which keep 90 % of
    the variance. The clusters are the best result of k-means from 5 starts (k-means++), with at most 500 rounds each.
    """
    try:
        from sklearn.cluster import KMeans
        from sklearn.decomposition import PCA
        from sklearn.exceptions import ConvergenceWarning
    except ImportError as reason:
        raise D5P4Error("MAUVE needs scikit-learn: pip install -e '.[lab]'") from reason
    p, q = _features("p", p_features), _features("q", q_features)
    if p.shape[1] != q.shape[1]:
        raise D5P4Error(f"p has {p.shape[1]} features per text, but q has {q.shape[1]}; they must have the same number")
    count = max(2, round(min(len(p), len(q)) / 10)) if clusters is None else whole("clusters", clusters)
    rows = np.concatenate([q, p])
    if count > len(rows):
        raise D5P4Error(f"clusters={count} is more than the number of texts, {len(rows)}; use fewer clusters")
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    rows = rows / np.where(lengths > 0, lengths, 1)
    if (rows == rows[0]).all():  # nothing varies
        return Clusters(np.zeros(len(p), np.int64), np.zeros(len(q), np.int64), count)
    pca = PCA(random_state=seed).fit(rows)
    kept = int(np.argmax(np.cumsum(pca.explained_variance_ratio_) >= VARIANCE)) + 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a warning about equal texts, which leave clusters empty
        means = KMeans(count, n_init=RESTARTS, max_iter=ITERATIONS, random_state=seed).fit(
            pca.transform(rows)[:, :kept]
        )
    labels = means.labels_.astype(np.int64)
    return Clusters(labels[len(q) :], labels[: len(q)], count)


def mauve_interval(
    p_features: ArrayLike,
    q_features: ArrayLike,
    *,
    p_groups: Sequence[Hashable] | None = None,
    q_groups: Sequence[Hashable] | None = None,
    smoothing: float = 0.0,
    clusters: int | None = None,
    seeds: Sequence[int] = (SEED, SEED + 1, SEED + 2, SEED + 3, SEED + 4),
    scaling: float = SCALING,
    draws: int = DRAWS,
) -> MauveInterval:
    """Return MAUVE with a 95 % interval from resampled texts, and the values of MAUVE for several seeds of k-means.

    Resampling keeps the clusters of the first seed. So the interval shows how MAUVE varies with the texts, and the
    values for `seeds` show how MAUVE varies with the clusters. Resampled histograms are less alike than the original
    histograms, which makes MAUVE smaller. The interval therefore has the spread of the resampled values, but lies
    around the original value. The interval does not include the bias of small samples, which also makes MAUVE smaller.

    p_groups, q_groups  [n] the group of each text. Texts of the same group were drawn together (as the texts of a
                        decoded set are) and are resampled together. By default every text is a group of its own
    """
    if not seeds:
        raise D5P4Error("seeds is empty: give at least one seed of k-means")
    whole("draws", draws)
    by_seed = [cluster(p_features, q_features, clusters=clusters, seed=seed) for seed in seeds]
    values = np.array([mauve_from_histograms(*c.histograms, smoothing=smoothing, scaling=scaling) for c in by_seed])
    first = by_seed[0]
    units = [
        _by_group(labels, groups, first.number, name)
        for name, labels, groups in (("p_groups", first.p, p_groups), ("q_groups", first.q, q_groups))
    ]
    random = np.random.default_rng(seeds[0])
    p, q = (random.multinomial(len(unit), np.full(len(unit), 1 / len(unit)), draws) @ unit for unit in units)
    again = _area(p, q, smoothing, scaling)
    low, high = np.clip(values[0] + np.quantile(again - again.mean(), [0.025, 0.975]), 0, 1)
    figure = Figure(float(values[0]), float(again.std(ddof=1)), float(low), float(high), len(units[1]))
    return MauveInterval(figure, values)


@torch.no_grad()
def last_token_features(
    judge: CausalJudge,
    texts: Sequence[str],
    max_tokens: int = 1024,
    max_tokens_per_batch: int = 8192,
) -> np.ndarray:
    """Return the features [n, D] by which the paper compares texts: the last layer's state at the last token, float32.

    Texts are cut to `max_tokens`, and to the judge's context. If the judge has a start token, the judge reads this
    token before every text, and the features of an empty text are the state at this token. Without a start token
    (start="", as in the paper) an empty text is an error. The size of batches changes time and memory, not results.
    """
    whole("max_tokens", max_tokens)
    before = [] if judge.start_id is None else [judge.start_id]
    rows = [(before + judge.tokens(text)[0][:max_tokens])[: judge.context] for text in strings(texts)]
    if [] in rows:
        raise D5P4Error(f"text {rows.index([])} is empty, and {judge.name!r} has no start token; leave out empty texts")
    states = np.zeros((len(rows), judge.model.config.hidden_size), dtype=np.float32)
    for batch in batches([len(row) for row in rows], max_tokens_per_batch):
        inputs, mask = padded([rows[i] for i in batch], judge.model.device)
        out = judge.model.base_model(input_ids=inputs, attention_mask=mask, use_cache=False).last_hidden_state
        states[batch] = out[torch.arange(len(batch), device=out.device), mask.sum(-1) - 1].float().cpu().numpy()
    if not np.isfinite(states).all():
        raise D5P4Error(f"{judge.name!r} gave hidden states that are not finite; check its weights or use float32")
    return states


def _area(p: np.ndarray, q: np.ndarray, smoothing: float, scaling: float) -> Floats:
    """Return [...]: the area under the MAUVE curve of each pair of histograms p [..., K] and q [..., K] (counts)."""
    p, q = p + smoothing, q + smoothing
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    corner = np.ones(p.shape[:-1])
    xs, ys = [corner], [0 * corner]  # the first point of the curve, (1, 0): r is q, and KL(p || r) counts as infinite
    for w in MIXTURES:
        r = w * p + (1 - w) * q
        xs.append(np.exp(-scaling * _divergence(q, r)))
        ys.append(np.exp(-scaling * _divergence(p, r)))
    x, y = np.stack([*xs, 0 * corner]), np.stack([*ys, corner])
    # The area is a sum of trapezoids over x. Swapping x and y gives the same sum, as x y is 0 at both ends.
    return ((x[:-1] - x[1:]) * (y[:-1] + y[1:])).sum(0) / 2


def _divergence(a: np.ndarray, r: np.ndarray) -> Floats:
    """Return KL(a || r) over the last axis, which is never negative. r must be positive wherever a is positive."""
    ratio = np.divide(a, r, out=np.ones_like(r), where=a > 0)
    return (a * np.log(ratio)).sum(-1).clip(min=0)


def _by_group(labels: np.ndarray, groups: Sequence[Hashable] | None, count: int, name: str) -> NDArray[np.int64]:
    """Count the texts of each group in each cluster. The result is [groups, count]."""
    if groups is None:
        groups = range(len(labels))
    if len(groups) != len(labels):
        raise D5P4Error(f"{name} has {len(groups)} entries, but there are {len(labels)} texts")
    places = {group: i for i, group in enumerate(dict.fromkeys(groups))}
    counts = np.zeros((len(places), count), dtype=np.int64)
    np.add.at(counts, (np.array([places[group] for group in groups]), labels), 1)
    return counts


def _features(name: str, features: ArrayLike) -> Floats:
    rows = np.asarray(features, dtype=np.float64)
    if rows.ndim != 2 or not rows.size:
        raise D5P4Error(
            f"the features of {name} must have shape [texts, numbers] with at least one text, not {rows.shape}"
        )
    if not np.isfinite(rows).all():
        raise D5P4Error(f"the features of {name} contain numbers that are not finite")
    return rows


def _at_least(name: str, value: float, least: float) -> None:
    if not (np.isfinite(value) and value >= least):
        raise D5P4Error(f"{name}={value!r} must be a number of at least {least}")


def linear_cka(x: ArrayLike, y: ArrayLike) -> float:
    """Return the linear CKA (0 to 1) of vectors x [n, D] and y [n, E] of the same n items (Kornblith et al., 2019).

    CKA = ⟨K, M⟩ / (‖K‖ ‖M‖) in Frobenius norm, with K = X Xᵀ and M = Y Yᵀ after the columns are centred. CKA is 0 if a
    norm is 0. CKA does not change if x or y is rotated or scaled.
    """
    a, b = float_rows(x, "x"), float_rows(y, "y")
    if len(a) != len(b):
        raise D5P4Error(f"CKA needs the same items in x and y, but x has {len(a)} rows and y has {len(b)}")
    if len(a) < 2:
        return 0.0
    a, b = _centred(a), _centred(b)
    k, m = a @ a.T, b @ b.T
    norms = np.linalg.norm(k) * np.linalg.norm(m)
    return float((k * m).sum() / norms) if norms > 0 else 0.0


def _centred(rows: Floats) -> Floats:
    """Scale the largest entry to 1 and centre the columns. Else the fourth powers in CKA could overflow or vanish."""
    size = np.abs(rows).max(initial=0)
    rows = rows / size if size > 0 else rows
    middle = rows - rows.mean(0)
    # A constant column should be 0 after centring, but rounding errors may be left. We set it to 0.
    middle[:, np.ptp(rows, axis=0) == 0] = 0
    return middle
