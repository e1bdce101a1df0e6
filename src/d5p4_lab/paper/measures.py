"""Measures that only the paper's tables need: MAUVE of texts, linear CKA of vectors, and repetition inside a text.

MAUVE (Pillutla et al., 2021; JMLR 2023) compares references with generated texts. All texts are put into common
clusters by their features. Let p be the histogram of references over these clusters, and q the histogram of
generated texts. MAUVE is the area under the curve of

    (exp(-c KL(q || r)), exp(-c KL(p || r))),  r = w p + (1 - w) q,  w from 0 to 1.

MAUVE is 1 for equal histograms and near 0 for histograms without a common cluster. MAUVE* smooths the histograms first
(`smoothing=STAR`). Fewer texts make MAUVE and MAUVE* smaller, so compare only values from the same numbers of texts.
"""

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from d5p4.errors import D5P4Error
from d5p4.eval.lexical import strings

from ..scoring.perplexity import CausalJudge
from ..scoring.reading import batches, padded
from ..statistics import NORMAL_95, Figure, widening

Floats = NDArray[np.float64]
STAR = 0.5  # MAUVE* adds this number to every count, as the estimator of Krichevsky and Trofimov does
SCALING = 5.0  # c in the formula above
MIXTURES = np.linspace(1e-6, 1 - 1e-6, 25)
MOST = 1024  # of MAUVE's texts, a judge reads at most this many tokens
VARIANCE = 0.9  # the share of the variance that the principal components keep
SEED, RESTARTS, ITERATIONS = 25, 5, 500


class Clusters(NamedTuple):
    """The cluster, from 0 to `number` - 1, of each reference (p [n_p]) and of each generated text (q [n_q])."""

    p: NDArray[np.int64]
    q: NDArray[np.int64]
    number: int


class MauveSamples(NamedTuple):
    """MAUVE of C cases (means over seeds of k-means) over R common resamples: what cases share cancels out."""

    values: Floats  # [C]
    seeds: Floats  # [S, C] the values for each seed of k-means
    resampled: Floats  # [R, C]
    interaction: Floats  # [R, C] see `contrasts`
    units: int  # the number of groups of generated texts
    widening: float  # the factor by which few groups widen an interval, as in `statistics.figure`


def common_clusters(
    p_features: ArrayLike, q_features: Sequence[ArrayLike], *, clusters: int | None = None, seed: int = SEED
) -> list[Clusters]:
    """Put references [n_p, D] and the generated texts [n_q, D] of C cases into clusters that all cases share.

    All rows of features are scaled to length 1 and projected on the first principal components, which keep 90 % of the
    variance. The clusters are the best result of k-means from 5 starts (k-means++). They are made from all references
    and every C-th text of each case, so that references and generated texts have about the same weight.
    """
    p, cases = np.asarray(p_features, np.float64), [np.asarray(q, np.float64) for q in q_features]
    count = clusters or max(2, round(min(len(p), *map(len, cases)) / 10))
    some_texts = [q[case :: len(cases)] for case, q in enumerate(cases)]
    labels = _quantiser(np.concatenate([*some_texts, p]), count, seed)
    return [Clusters(labels(p), labels(q), count) for q in cases]


def mauve_samples(
    clusters: Sequence[Sequence[Clusters]],
    *,
    p_groups: Sequence[Hashable],
    q_groups: Sequence[Hashable],
    smoothing: float = 0.0,
    draws: int = 500,
) -> MauveSamples:
    """Return MAUVE of several cases, and its values over resampled texts in fixed clusters. `contrasts` compares them.

    clusters            [S][C] the clusters of each case, for each seed of k-means
    p_groups, q_groups  [n] the group of each text. Texts of the same group were drawn together (as the texts of a
                        decoded set are) and are resampled together
    """
    random = np.random.default_rng(SEED)
    values, resampled, interaction = [], [], []
    counts: list[list[np.ndarray]] = []  # two resamples of the groups of references, and two of those of texts
    sizes = [0, 0]
    for labels in (labels for by_case in clusters for labels in by_case):
        groups = [_by_group(side, given, labels.number) for side, given in ((labels.p, p_groups), (labels.q, q_groups))]
        if not counts:
            sizes = [len(group) for group in groups]
            counts = [[random.multinomial(n, np.full(n, 1 / n), draws) for _ in range(2)] for n in sizes]
        (p, p1, p2), (q, q1, q2) = (
            [group.sum(0), *(drawn @ group for drawn in both)] for group, both in zip(groups, counts, strict=True)
        )
        values.append(mauve(p, q, smoothing))
        resampled.append(mauve(p1, q1, smoothing))
        first, second = (mauve((p + x) / 2, (q + y) / 2, smoothing) for x, y in ((p1, q1), (p2, q2)))
        both_noises = mauve((p1 + p2) / 2, (q1 + q2) / 2, smoothing)
        interaction.append(4 * (both_noises - first - second + values[-1]))
    shape = len(clusters), len(clusters[0])
    by_seed = np.array(values).reshape(shape)
    noise, product = (np.stack(x).reshape(*shape, draws).mean(0).T for x in (resampled, interaction))
    return MauveSamples(by_seed.mean(0), by_seed, noise, product, sizes[1], widening(min(sizes)))


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
    pairs = zip((w @ samples.values).tolist(), (samples.widening * np.sqrt(variance)).tolist(), strict=True)
    return [Figure(value, se, value - reach * se, value + reach * se, samples.units) for value, se in pairs]


@torch.no_grad()
def last_token_features(judge: CausalJudge, texts: Sequence[str], max_tokens_per_batch: int = 8192) -> np.ndarray:
    """Return the features [n, D] by which the paper compares texts: the last layer's state at the last token, float32.

    Texts are cut to `MOST` tokens and to the judge's context. An empty text counts as the judge's end-of-text token.
    """
    end = judge.tokenizer.eos_token_id if judge.tokenizer.eos_token else judge.tokenizer.bos_token_id
    rows = [judge.tokens(text)[0][: min(MOST, judge.context or MOST)] or [end] for text in strings(texts)]
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
        means = KMeans(count, n_init=RESTARTS, max_iter=ITERATIONS, random_state=seed)
        means.fit(pca.transform(rows)[:, :kept])
    return lambda given: means.predict(pca.transform(unit(given))[:, :kept]).astype(np.int64)


def mauve(p: Any, q: Any, smoothing: float = 0.0) -> Floats:
    """Return MAUVE [...] of each pair of histograms p [..., K] of references and q [..., K] of texts (counts).

    `smoothing` is added to every count: 0 for MAUVE, STAR for MAUVE*.
    """
    p, q = (np.asarray(side, np.float64) + smoothing for side in (p, q))
    p, q = (side / side.sum(-1, keepdims=True) for side in (p, q))
    corner = np.ones(p.shape[:-1])
    xs, ys = [corner], [0 * corner]  # the first point of the curve, (1, 0): r is q, and KL(p || r) is infinite
    own = [(side * np.log(side, out=np.zeros_like(side), where=side > 0)).sum(-1) for side in (q, p)]
    for w in MIXTURES:
        r = w * p + (1 - w) * q
        log = np.log(r, out=np.zeros_like(r), where=r > 0)
        for curve, side, entropy in ((xs, q, own[0]), (ys, p, own[1])):
            divergence = entropy - np.einsum("...k,...k->...", side, log)  # KL(side || r)
            curve.append(np.exp(-SCALING * divergence.clip(min=0)))
    x, y = np.stack([*xs, 0 * corner]), np.stack([*ys, corner])
    # The area is a sum of trapezoids over x. Swapping x and y gives the same sum, as x y is 0 at both ends.
    return ((x[:-1] - x[1:]) * (y[:-1] + y[1:])).sum(0) / 2


def _by_group(labels: np.ndarray, groups: Sequence[Hashable], count: int) -> NDArray[np.int64]:
    places = {group: i for i, group in enumerate(dict.fromkeys(groups))}
    counts = np.zeros((len(places), count), dtype=np.int64)
    np.add.at(counts, (np.array([places[group] for group in groups]), labels), 1)
    return counts


def linear_cka(x: ArrayLike, y: ArrayLike) -> float:
    """Return the linear CKA (0 to 1) of vectors x [n, D] and y [n, E] of the same n items (Kornblith et al., 2019).

    CKA = ⟨K, M⟩ / (‖K‖ ‖M‖) in Frobenius norm, with K = X Xᵀ and M = Y Yᵀ after the columns are centred.
    """
    a, b = (_centred(np.asarray(rows, np.float64)) for rows in (x, y))
    k, m = a @ a.T, b @ b.T
    norms = np.linalg.norm(k) * np.linalg.norm(m)
    return float((k * m).sum() / norms) if norms > 0 else 0.0


def _centred(rows: Floats) -> Floats:
    """Scale the largest entry to 1 (else fourth powers in CKA could overflow or vanish) and centre the columns."""
    rows = rows / (np.abs(rows).max(initial=0) or 1)
    middle = rows - rows.mean(0)
    middle[:, np.ptp(rows, axis=0) == 0] = 0  # rounding errors of constant columns
    return middle


def repeated_triples(text: str) -> float:
    """The share of a text's word triples that already occurred earlier in the text."""
    words = text.split()
    triples = list(zip(words, words[1:], words[2:], strict=False))
    return 1 - len(set(triples)) / len(triples) if triples else 0.0


def rounded(values: Mapping[str, float]) -> dict[str, float]:
    """Round numbers, except whole ones, to five significant digits, for a file."""
    return {name: value if isinstance(value, int) else float(f"{value:.5g}") for name, value in values.items()}
