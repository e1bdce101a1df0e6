"""Measures that only the paper's tables need: MAUVE of texts, linear CKA of vectors, and repetition inside a text.

MAUVE (Pillutla et al., 2021; JMLR 2023) compares references with generated texts. All texts are put into common
clusters by their features. Let p be the histogram of references over these clusters, and q the histogram of
generated texts. MAUVE is the area under the curve of

    (exp(-c KL(q || r)), exp(-c KL(p || r))),  r = w p + (1 - w) q,  w from 0 to 1.

MAUVE is 1 for equal histograms and near 0 for histograms without a common cluster. MAUVE* smooths the histograms first
(`smoothing=STAR`). Fewer texts make MAUVE and MAUVE* smaller, so compare only values from the same numbers of texts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from d5p4.errors import D5P4Error
from d5p4.eval.lexical import strings
from d5p4.eval.similarity import float_rows
from d5p4.options import whole

from ..scoring.perplexity import CausalJudge
from ..scoring.reading import batches, padded
from ..statistics import NORMAL_95, Figure, widening

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


class MauveSamples(NamedTuple):
    """MAUVE of C cases that are compared with the same references, and how it varies over R common resamples.

    In each resample, all cases have the same references and the same sets, so what they have in common cancels in
    differences. All values are means over seeds of k-means.
    """

    values: Floats  # [C]
    seeds: Floats  # [S, C] the values for each seed of k-means
    resampled: Floats  # [R, C]
    interaction: Floats  # [R, C] see `contrasts`
    units: int  # the number of groups of generated texts
    widening: float  # the factor by which few groups widen an interval, as in `statistics.figure`


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
    p, q = _same_features(p_features, q_features)
    count = _number_of_clusters(len(p), len(q), clusters)
    labels = _quantiser(np.concatenate([q, p]), count, seed)
    return Clusters(labels(p), labels(q), count)


def common_clusters(
    p_features: ArrayLike, q_features: Sequence[ArrayLike], *, clusters: int | None = None, seed: int = SEED
) -> list[Clusters]:
    """Put references [n_p, D] and the generated texts [n_q, D] of C cases into clusters that all cases share.

    The clusters are made as in `cluster`, from all references and every C-th text of each case, so that references and
    generated texts have about the same weight. Differences between cases vary less in common clusters than in the
    clusters that `cluster` makes for each case.
    """
    pairs = [_same_features(p_features, q) for q in q_features]
    p, cases = pairs[0][0], [q for _, q in pairs]
    count = _number_of_clusters(len(p), min(map(len, cases)), clusters)
    some_texts = [q[case :: len(cases)] for case, q in enumerate(cases)]
    labels = _quantiser(np.concatenate([*some_texts, p]), count, seed)
    return [Clusters(labels(p), labels(q), count) for q in cases]


def mauve_samples(
    clusters: Sequence[Sequence[Clusters]],
    *,
    p_groups: Sequence[Hashable] | None = None,
    q_groups: Sequence[Hashable] | None = None,
    smoothing: float = 0.0,
    scaling: float = SCALING,
    draws: int = 500,
) -> MauveSamples:
    """Return MAUVE of several cases, and its values over resampled texts in fixed clusters. `contrasts` compares them.

    clusters            [S][C] the clusters of each case, for each seed of k-means
    p_groups, q_groups  [n] the group of each text. Texts of the same group were drawn together (as the texts of a
                        decoded set are) and are resampled together. By default every text is a group of its own. The
                        groups are the same in all cases: set 3 of one case has the random numbers of set 3 of another
    """
    if not clusters:
        raise D5P4Error("clusters is empty: give the clusters of at least one seed of k-means")
    whole("draws", draws)
    random = np.random.default_rng(SEED)
    seeds: list[list[Floats]] = []
    resampled, interaction = np.zeros(()), np.zeros(())
    counts: list[list[np.ndarray]] = []  # two resamples of the groups of references, and two of those of texts
    sizes = [0, 0]
    for by_case in clusters:
        values, whole_noise, products = [], [], []
        for labels in by_case:
            groups = [
                _by_group(side, given, labels.number, name)
                for name, side, given in (("p_groups", labels.p, p_groups), ("q_groups", labels.q, q_groups))
            ]
            if not counts:
                sizes = [len(group) for group in groups]
                counts = [[random.multinomial(n, np.full(n, 1 / n), draws) for _ in range(2)] for n in sizes]
            (p, p1, p2), (q, q1, q2) = (
                [group.sum(0), *(drawn @ group for drawn in both)] for group, both in zip(groups, counts, strict=True)
            )
            value = _area(p, q, smoothing, scaling)
            first, second = (_area((p + x) / 2, (q + y) / 2, smoothing, scaling) for x, y in ((p1, q1), (p2, q2)))
            values.append(value)
            whole_noise.append(_area(p1, q1, smoothing, scaling))
            products.append(4 * (_area((p1 + p2) / 2, (q1 + q2) / 2, smoothing, scaling) - first - second + value))
        seeds.append(values)
        resampled = resampled + np.stack(whole_noise, 1) / len(clusters)
        interaction = interaction + np.stack(products, 1) / len(clusters)
    by_seed = np.array(seeds)
    return MauveSamples(by_seed.mean(0), by_seed, resampled, interaction, sizes[1], widening(min(sizes)))


def contrasts(samples: MauveSamples, weights: ArrayLike, together: bool = False) -> list[Figure]:
    """Return the figures of J sums of MAUVE, each with weights [C]: (0, 1, -1) is case 1 minus case 2.

    MAUVE is near its maximum, so sampling noise e enters it mainly through a quadratic form, Q(d + e), where d is the
    difference of the true histograms. A resample adds noise to d + e, so its variance is too large: by twice the
    variance of the pure noise, which is the variance of the interaction of two independent resamples, 4 (Q((e₁ + e₂)
    / 2) - Q(e₁ / 2) - Q(e₂ / 2) + Q(0)). This variance is subtracted. The interval does not include the bias of small
    samples, which makes MAUVE smaller.

    together  whether 95 % is the chance that all J intervals contain their truth. Use this if you pick one of them
    """
    w = np.asarray(weights, dtype=np.float64)
    noise, product = ((x - x.mean(0)) @ w.T for x in (samples.resampled, samples.interaction))  # [R, J]
    variance = np.maximum(noise.var(0) - product.var(0), product.var(0) / 2)
    spread = noise.std(0)
    relative = np.divide(np.abs(noise), spread, out=np.zeros_like(noise), where=spread > 0)
    reach = max(NORMAL_95, float(np.quantile(relative.max(1), 0.95))) if together else NORMAL_95
    figures = []
    for value, se in zip(w @ samples.values, samples.widening * np.sqrt(variance), strict=True):
        figures.append(
            Figure(float(value), float(se), float(value - reach * se), float(value + reach * se), samples.units)
        )
    return figures


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


def _quantiser(rows: Floats, count: int, seed: int) -> Callable[[Floats], NDArray[np.int64]]:
    """Make clusters of rows [n, D]. Return a function that maps rows [m, D] to clusters [m]."""
    try:
        from sklearn.cluster import KMeans
        from sklearn.decomposition import PCA
        from sklearn.exceptions import ConvergenceWarning
    except ImportError as reason:
        raise D5P4Error("MAUVE needs scikit-learn: pip install -e '.[lab]'") from reason
    if count > len(rows):
        raise D5P4Error(f"clusters={count} is more than the number of texts, {len(rows)}; use fewer clusters")

    def unit(given: Floats) -> Floats:
        lengths = np.linalg.norm(given, axis=1, keepdims=True)
        return given / np.where(lengths > 0, lengths, 1)

    rows = unit(rows)
    if (rows == rows[0]).all():  # nothing varies
        return lambda given: np.zeros(len(given), np.int64)
    pca = PCA(random_state=seed).fit(rows)
    kept = int(np.argmax(np.cumsum(pca.explained_variance_ratio_) >= VARIANCE)) + 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # a warning about equal texts, which leave clusters empty
        means = KMeans(count, n_init=RESTARTS, max_iter=ITERATIONS, random_state=seed).fit(
            pca.transform(rows)[:, :kept]
        )
    return lambda given: means.predict(pca.transform(unit(given))[:, :kept]).astype(np.int64)


def _number_of_clusters(n_p: int, n_q: int, clusters: int | None) -> int:
    return max(2, round(min(n_p, n_q) / 10)) if clusters is None else whole("clusters", clusters)


def _area(p: np.ndarray, q: np.ndarray, smoothing: float, scaling: float) -> Floats:
    """Return [...]: the area under the MAUVE curve of each pair of histograms p [..., K] and q [..., K] (counts)."""
    p, q = p + smoothing, q + smoothing
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    corner = np.ones(p.shape[:-1])
    xs, ys = [corner], [0 * corner]  # the first point of the curve, (1, 0): r is q, and KL(p || r) counts as infinite
    own = [(side * np.log(side, out=np.zeros_like(side), where=side > 0)).sum(-1) for side in (q, p)]
    for w in MIXTURES:
        r = w * p + (1 - w) * q
        log = np.log(r, out=np.zeros_like(r), where=r > 0)
        for curve, side, entropy in ((xs, q, own[0]), (ys, p, own[1])):
            divergence = entropy - np.einsum("...k,...k->...", side, log)  # KL(side || r)
            curve.append(np.exp(-scaling * divergence.clip(min=0)))
    x, y = np.stack([*xs, 0 * corner]), np.stack([*ys, corner])
    # The area is a sum of trapezoids over x. Swapping x and y gives the same sum, as x y is 0 at both ends.
    return ((x[:-1] - x[1:]) * (y[:-1] + y[1:])).sum(0) / 2


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


def _same_features(p_features: ArrayLike, q_features: ArrayLike) -> tuple[Floats, Floats]:
    p, q = _features("p", p_features), _features("q", q_features)
    if p.shape[1] != q.shape[1]:
        raise D5P4Error(f"p has {p.shape[1]} features per text, but q has {q.shape[1]}; they must have the same number")
    return p, q


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


def repeated_triples(text: str) -> float:
    """The share of a text's word triples that already occurred earlier in the text."""
    words = text.split()
    triples = list(zip(words, words[1:], words[2:], strict=False))
    return 1 - len(set(triples)) / len(triples) if triples else 0.0


def rounded(values: Mapping[str, float]) -> dict[str, float]:
    """Round numbers to five significant digits, for a file. Whole numbers stay as they are."""
    return {name: value if isinstance(value, int) else float(f"{value:.5g}") for name, value in values.items()}
