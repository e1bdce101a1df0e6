"""Measures that only the paper's tables need: MAUVE of two samples of texts, and linear CKA of two views of items.

MAUVE (Pillutla et al., 2021; JMLR 2023) compares references p with generated texts q. Both are turned into features,
the features into histograms over common clusters, and the histograms into the area under the curve of

    (exp(-c KL(q || r)), exp(-c KL(p || r))),  r = w p + (1 - w) q,  w from 0 to 1.

It is 1 for equal histograms and near 0 for histograms without a common cluster. MAUVE* smooths the histograms first:
`smoothing=STAR`. Few texts make both small, so compare only values from the same numbers of texts.
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
from d5p4.eval.reading import batches, padded, strings, whole

from ..statistics import DRAWS, Figure

Floats = NDArray[np.float64]
STAR = 0.5  # MAUVE*: what Krichevsky and Trofimov add to every count
SCALING = 5.0  # c
MIXTURES = np.linspace(1e-6, 1 - 1e-6, 25)
VARIANCE = 0.9  # what the principal components keep
SEED, RESTARTS, ITERATIONS = 25, 5, 500


class Clusters(NamedTuple):
    """Which of the `number` clusters each reference [n_p] and each generated text [n_q] lies in."""

    p: NDArray[np.int64]
    q: NDArray[np.int64]
    number: int

    @property
    def histograms(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """References and generated texts in each cluster, [number] both."""
        return np.bincount(self.p, minlength=self.number), np.bincount(self.q, minlength=self.number)


class MauveInterval(NamedTuple):
    """MAUVE and how much it varies by chance."""

    figure: Figure  # for the first seed; its interval comes from resampled texts in the same clusters
    seeds: Floats  # [S] the value for each seed of k-means


def mauve(
    p_features: ArrayLike,
    q_features: ArrayLike,
    *,
    smoothing: float = 0.0,
    clusters: int | None = None,
    seed: int = SEED,
    scaling: float = SCALING,
) -> float:
    """MAUVE of generated texts with features [n_q, D] against references with features [n_p, D], from 0 to 1.

    smoothing  added to every count of both histograms: 0, or STAR for MAUVE*
    clusters   by default a tenth of the smaller sample, at least 2
    """
    histograms = cluster(p_features, q_features, clusters=clusters, seed=seed).histograms
    return mauve_from_histograms(*histograms, smoothing=smoothing, scaling=scaling)


def mauve_from_histograms(p: ArrayLike, q: ArrayLike, *, smoothing: float = 0.0, scaling: float = SCALING) -> float:
    """MAUVE of two histograms [K], counts or shares; `smoothing` is added to counts."""
    pair = np.asarray(p, dtype=np.float64), np.asarray(q, dtype=np.float64)
    if pair[0].ndim != 1 or pair[0].shape != pair[1].shape:
        raise D5P4Error(f"two histograms over the same bins are needed, not shapes {pair[0].shape}, {pair[1].shape}")
    for name, counts in zip("pq", pair, strict=True):
        if not (np.isfinite(counts).all() and (counts >= 0).all() and counts.sum() > 0):
            raise D5P4Error(f"the histogram {name} must hold numbers from 0 up, not all of them 0")
    _at_least("smoothing", smoothing, 0)
    _at_least("scaling", scaling, 0)
    return float(_area(*pair, smoothing, scaling))


def cluster(p_features: ArrayLike, q_features: ArrayLike, *, clusters: int | None = None, seed: int = SEED) -> Clusters:
    """Common clusters of references [n_p, D] and generated texts [n_q, D].

    Rows get length 1, then the principal components of q and p together that keep 90 % of the variance, then k-means:
    the best of 5 starts (k-means++) of at most 500 rounds.
    """
    try:
        from sklearn.cluster import KMeans
        from sklearn.decomposition import PCA
        from sklearn.exceptions import ConvergenceWarning
    except ImportError as reason:
        raise D5P4Error("MAUVE needs scikit-learn: pip install -e '.[lab]'") from reason
    p, q = _features("p", p_features), _features("q", q_features)
    if p.shape[1] != q.shape[1]:
        raise D5P4Error(f"features of {p.shape[1]} and of {q.shape[1]} numbers cannot be compared")
    count = whole("clusters", clusters) or max(2, round(min(len(p), len(q)) / 10))
    rows = np.concatenate([q, p])
    if count > len(rows):
        raise D5P4Error(f"clusters={count} are more than the {len(rows)} texts")
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    rows = rows / np.where(lengths > 0, lengths, 1)
    if (rows == rows[0]).all():  # nothing varies
        return Clusters(np.zeros(len(p), np.int64), np.zeros(len(q), np.int64), count)
    pca = PCA(random_state=seed).fit(rows)
    kept = int(np.argmax(np.cumsum(pca.explained_variance_ratio_) >= VARIANCE)) + 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # equal texts may leave clusters empty
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
    """MAUVE, a 95 % interval by resampling texts, and the value for other seeds of k-means.

    The clusters of the first seed stay as they are while texts are resampled: the interval shows the chance in drawing
    texts, the spread over `seeds` the chance in clustering. Resampling makes histograms less alike and MAUVE smaller,
    so the interval has the spread of the resampled values, placed around the value itself. The bias of few texts, which
    make MAUVE small, is not in it.

    p_groups, q_groups  [n] a name for each text: texts of one name were drawn together (a decoded set) and are
                        resampled together. By default every text is a group of its own
    """
    if not seeds:
        raise D5P4Error("seeds is empty: name at least one seed of k-means")
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
    batch_size: int = 16,
    max_tokens_per_batch: int | None = None,
) -> np.ndarray:
    """The features by which the paper compares texts: the last layer's state at the last token, [n, D] float32.

    Texts are cut to `max_tokens`, and to the judge's context. A text is read as it is scored: after the start token if
    the judge has one (the paper has none: start=""), whose state stands for an empty text. Without a start token an
    empty text is an error. The sizes of batches change cost and memory, not results.
    """
    whole("max_tokens", max_tokens)
    before = [] if judge.start_id is None else [judge.start_id]
    rows = [(before + judge.tokens(text)[0][:max_tokens])[: judge.context] for text in strings(texts)]
    if [] in rows:
        raise D5P4Error(f"text {rows.index([])} is empty: it has no last token, and {judge.name!r} no start token")
    states = np.zeros((len(rows), judge.model.config.hidden_size), dtype=np.float32)
    for batch in batches([len(row) for row in rows], batch_size, max_tokens_per_batch):
        inputs, mask = padded([rows[i] for i in batch], judge.model.device)
        out = judge.model.base_model(input_ids=inputs, attention_mask=mask, use_cache=False).last_hidden_state
        states[batch] = out[torch.arange(len(batch), device=out.device), mask.sum(-1) - 1].float().cpu().numpy()
    if not np.isfinite(states).all():
        raise D5P4Error(f"{judge.name!r} gave states that are not finite; check its weights or use float32")
    return states


def _area(p: np.ndarray, q: np.ndarray, smoothing: float, scaling: float) -> Floats:
    """The area under the curve of counts [..., K]: [...]."""
    p, q = p + smoothing, q + smoothing
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    corner = np.ones(p.shape[:-1])
    xs, ys = [corner], [0 * corner]  # where r is q, and KL(p || r) taken as infinite
    for w in MIXTURES:
        r = w * p + (1 - w) * q
        xs.append(np.exp(-scaling * _divergence(q, r)))
        ys.append(np.exp(-scaling * _divergence(p, r)))
    x, y = np.stack([*xs, 0 * corner]), np.stack([*ys, corner])
    # Trapezoids over x. Those over y have the same sum, x y being 0 at both ends: so has the mean of the two.
    return ((x[:-1] - x[1:]) * (y[:-1] + y[1:])).sum(0) / 2


def _divergence(a: np.ndarray, r: np.ndarray) -> Floats:
    """KL(a || r) over the last axis, r > 0 wherever a > 0. Never below 0, whatever rounding does."""
    ratio = np.divide(a, r, out=np.ones_like(r), where=a > 0)
    return (a * np.log(ratio)).sum(-1).clip(min=0)


def _by_group(labels: np.ndarray, groups: Sequence[Hashable] | None, count: int, name: str) -> NDArray[np.int64]:
    """How many texts of each group lie in each cluster, [groups, count]."""
    if groups is None:
        groups = range(len(labels))
    if len(groups) != len(labels):
        raise D5P4Error(f"{name} names {len(groups)} texts, there are {len(labels)}")
    places = {group: i for i, group in enumerate(dict.fromkeys(groups))}
    counts = np.zeros((len(places), count), dtype=np.int64)
    np.add.at(counts, (np.array([places[group] for group in groups]), labels), 1)
    return counts


def _features(name: str, features: ArrayLike) -> Floats:
    rows = np.asarray(features, dtype=np.float64)
    if rows.ndim != 2 or not rows.size:
        raise D5P4Error(f"the features of {name} must have shape [texts, numbers] with at least one text: {rows.shape}")
    if not np.isfinite(rows).all():
        raise D5P4Error(f"the features of {name} hold numbers that are not finite")
    return rows


def _at_least(name: str, value: float, least: float) -> None:
    if not (np.isfinite(value) and value >= least):
        raise D5P4Error(f"{name}={value!r} must be a number of at least {least}")


def linear_cka(x: ArrayLike, y: ArrayLike) -> float:
    """Linear CKA of x [n, D] and y [n, E], row i of both for the same item: 0 to 1 (Kornblith et al., 2019).

    ⟨K, M⟩ / (‖K‖ ‖M‖) in Frobenius norm, with K = X Xᵀ and M = Y Yᵀ after columns are centred; 0 if a norm is 0. The
    same for any rotation and any scale of x or y.
    """
    a, b = float_rows(x, "x"), float_rows(y, "y")
    if len(a) != len(b):
        raise D5P4Error(f"CKA compares views of the same items: x has {len(a)} rows, y has {len(b)}")
    if len(a) < 2:
        return 0.0
    a, b = _centred(a), _centred(b)
    k, m = a @ a.T, b @ b.T
    norms = np.linalg.norm(k) * np.linalg.norm(m)
    return float((k * m).sum() / norms) if norms > 0 else 0.0


def _centred(rows: Floats) -> Floats:
    """Columns of mean 0, and the largest entry 1 so that fourth powers neither overflow nor vanish."""
    size = np.abs(rows).max(initial=0)
    rows = rows / size if size > 0 else rows
    middle = rows - rows.mean(0)
    # Columns that do not vary are left with rounding, which is no signal.
    middle[:, np.ptp(rows, axis=0) == 0] = 0
    return middle
