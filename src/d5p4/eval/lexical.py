"""Metrics of words: how close answers are to references, and how much the answers of a group differ.

Overlaps (F1, BLEU) compare words as they are written; counts (distinct-n, EAD, entropy) use the paper's word pieces, or
others where given. BLEU is sacrebleu's, from 0 to 100; everything else is a share of 1, or nats.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import D5P4Error
from .wordpieces import WordPieces, word_pieces

ORDER = 4  # n-grams of BLEU


def f1(prediction: str, references: Sequence[str]) -> float:
    """2·overlap / (words of one + words of the other), the best over references.

    Words are lower-cased and split at white space; the overlap counts a word as often as both have it. Punctuation and
    articles stay, unlike in SQuAD's F1.
    """
    words = Counter(prediction.lower().split())
    return max(_overlap(words, Counter(one.lower().split())) for one in _list(references, "reference"))


def _overlap(one: Counter[str], other: Counter[str]) -> float:
    words = one.total() + other.total()
    return 2 * (one & other).total() / words if words else 0.0


def distinct(texts: Sequence[str], n: int, pieces: WordPieces | None = None) -> float:
    """Distinct-n: different n-grams of a group of texts over all of them. 0 without word pieces.

    Each text starts with n - 1 markers, so it has as many n-grams as word pieces.
    """
    if n < 1:
        raise D5P4Error(f"n={n} must be at least 1")
    rows = _ids(texts, pieces)
    total = sum(map(len, rows))
    different = {gram for row in rows for gram in _grams((-1,) * (n - 1) + row, n)}
    return len(different) / total if total else 0.0


def vocabulary_size(references: Iterable[str], pieces: WordPieces | None = None) -> int:
    """V of `ead`: different word pieces in all references of a data set."""
    return len({piece for row in _ids(references, pieces) for piece in row})


def ead(texts: Sequence[str], vocabulary: int, pieces: WordPieces | None = None) -> float:
    """Expectation-adjusted distinct: N / (V (1 - ((V - 1) / V)^C)); N of the group's C word pieces are different.

    The denominator is the expected number of different ones in C uniform draws from V, so long texts do not score
    lower as they do with distinct-1 (Liu et al., 2022). V comes from `vocabulary_size`. 0 without word pieces.
    """
    return ead_of_counts(*piece_counts(texts, pieces), vocabulary)


def piece_counts(texts: Sequence[str], pieces: WordPieces | None = None) -> tuple[int, int]:
    """The number of word pieces in a group of texts, and the number of different ones."""
    rows = _ids(texts, pieces)
    return sum(map(len, rows)), len({piece for row in rows for piece in row})


def ead_of_counts(count: int, different: int, vocabulary: int) -> float:
    """`ead` of a group with `count` word pieces, `different` of them different."""
    if vocabulary < 1:
        raise D5P4Error(f"vocabulary={vocabulary} must be at least 1")
    expected = -vocabulary * math.expm1(count * math.log1p(-1 / vocabulary)) if vocabulary > 1 else 1.0
    return different / expected if count else 0.0


def empirical_entropy(text: str, pieces: WordPieces | None = None) -> float:
    """-Σ f log f over the shares f of a text's word pieces, in nats. 0 for a text without any."""
    counts = np.array(list(Counter(_ids([text], pieces)[0]).values()))
    shares = counts / counts.sum() if len(counts) else np.ones(1)
    return abs(float(-(shares * np.log(shares)).sum()))  # -0.0 is 0.0


def bleu(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Corpus BLEU, 0 to 100: 13a tokens, exponential smoothing; each prediction has its own references."""
    if len(predictions) != len(references):
        raise D5P4Error(f"there are {len(predictions)} predictions and {len(references)} lists of references")
    lists = [_list(own, "reference") for own in references]
    most = max(map(len, lists), default=1)
    padded = [[*own, *own[:1] * (most - len(own))] for own in lists]  # a reference twice changes nothing
    if not padded:
        raise D5P4Error("a corpus BLEU needs at least one prediction")
    streams = [list(stream) for stream in zip(*padded, strict=True)]
    return float(_bleu(False).corpus_score(list(predictions), streams).score)


def sentence_bleu(prediction: str, references: Sequence[str]) -> float:
    """BLEU of one text, 0 to 100, over the n-gram orders it is long enough for ("effective order")."""
    return float(_bleu(True).sentence_score(prediction, _list(references, "reference")).score)


def self_bleu(texts: Sequence[str]) -> float:
    """S-BLEU, 0 to 100: mean over texts of the sentence BLEU against the others of the group. 0 for a single text."""
    texts = _list(texts, "text")
    if len(texts) == 1:
        return 0.0
    rows = [_bleu(True).tokenizer(text.rstrip()).split() for text in texts]
    counts = [Counter(gram for n in range(1, ORDER + 1) for gram in _grams(row, n)) for row in rows]
    # Among several references, the one that has an n-gram most often counts. With one text left out this is the highest
    # count, or the second where the highest is that text's own; so all texts need to be counted only once.
    highest: dict[tuple[str, ...], tuple[int, int, int]] = {}  # count, whose, the next count
    for place, own in enumerate(counts):
        for gram, count in own.items():
            first, whose, second = highest.get(gram, (0, -1, 0))
            highest[gram] = (count, place, first) if count > first else (first, whose, max(second, count))
    scores = []
    for place, own in enumerate(counts):
        right, total = [0] * ORDER, [0] * ORDER
        for gram, count in own.items():
            first, whose, second = highest[gram]
            total[len(gram) - 1] += count
            right[len(gram) - 1] += min(count, second if whose == place else first)
        length = len(rows[place])
        _, nearest = min((abs(len(row) - length), len(row)) for i, row in enumerate(rows) if i != place)
        scores.append(
            _bleu(True).compute_bleu(right, total, length, nearest, smooth_method="exp", effective_order=True).score
        )
    return sum(scores) / len(scores)


def _grams(row: Sequence[Any], n: int) -> Iterable[tuple[Any, ...]]:
    return zip(*(row[i:] for i in range(n)), strict=False)


def bleu_parts(prediction: str, references: Sequence[str]) -> NDArray[np.float64]:
    """[10]: n-grams matched and n-grams by order, length and reference length; sums over a corpus give its BLEU."""
    score = _bleu(True).sentence_score(prediction, _list(references, "reference"))
    return np.array([*score.counts, *score.totals, score.sys_len, score.ref_len], dtype=np.float64)


def bleu_of_parts(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """[R]: corpus BLEU from sums of `bleu_parts` [R, 10]."""
    compute = partial(_bleu(False).compute_bleu, smooth_method="exp")
    rows = [[int(x) for x in row] for row in sums.round()]
    return np.array([compute(row[:ORDER], row[ORDER:-2], *row[-2:]).score for row in rows])


@lru_cache(maxsize=2)
def _bleu(effective_order: bool) -> Any:
    try:
        from sacrebleu.metrics import BLEU
    except ImportError as reason:
        raise D5P4Error("BLEU needs sacrebleu: pip install 'd5p4[eval]'") from reason
    return BLEU(effective_order=effective_order, max_ngram_order=ORDER)


def _ids(texts: Iterable[str], pieces: WordPieces | None) -> list[tuple[int, ...]]:
    if isinstance(texts, str):
        raise D5P4Error(f"texts must be a list of strings, not {texts!r:.60}")
    codec = pieces or word_pieces()
    return [codec.ids(text) for text in texts]


def _list(texts: Sequence[str], what: str) -> list[str]:
    if isinstance(texts, str) or not len(texts):
        raise D5P4Error(f"a list of at least one {what} is needed, got {texts!r:.60}")
    return list(texts)
