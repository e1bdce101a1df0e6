"""Metrics of words: how close answers are to references, and how much the answers of a group differ.

F1 compares words between white space, and BLEU compares the tokens of sacrebleu. Distances, distinct-n, EAD and entropy
count the units into which the function `units` cuts a text: by default lower-cased words and punctuation marks. BLEU is
0 to 100. Entropy is in nats. The other metrics are ratios; 1 means 100 %.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any
from unicodedata import normalize

import numpy as np

from ..errors import D5P4Error

ORDER = 4  # BLEU counts n-grams for n = 1 to 4
Units = Callable[[str], Sequence[Hashable]]

NEAR = 0.225  # below this distance, a reader mostly calls two answers the same (docs/decisions.md)
_ALONE = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"  # scripts without spaces
_WORD = re.compile(rf"[{_ALONE}]|[^\W{_ALONE}]+|[^\w\s]")


def words(text: str) -> list[str]:
    """Return the lower-cased words and punctuation marks of a text. In scripts without spaces, letters are words."""
    return _WORD.findall(normalize("NFC", text).lower())


def distances(texts: Sequence[str]) -> list[list[float]]:
    """Return the distance of every two texts: 1 - 2·c / (a + b).

    a and b are the numbers of words of the two texts, and c is the largest number of words that both have in the same
    order (their longest common subsequence). Equal texts have distance 0, and texts without a common word distance 1.
    """
    rows = [words(text) for text in strings(texts)]
    result = [[0.0] * len(rows) for _ in rows]
    for i, row in enumerate(rows):
        places: dict[str, int] = {}  # for each word of this text, a number whose bit n is set if the word is at place n
        for n, word in enumerate(row):
            places[word] = places.get(word, 0) | 1 << n
        for j, other in enumerate(rows[:i]):
            total = len(row) + len(other)
            result[i][j] = result[j][i] = 1 - 2 * _common(places, len(row), other) / total if total else 0.0
    return result


def near_copies(distances: Sequence[Sequence[float]]) -> list[bool]:
    """Return which texts are near copies: their distance to an earlier text is below `NEAR`."""
    return [min(row[:i], default=1.0) < NEAR for i, row in enumerate(distances)]


def _common(places: Mapping[str, int], length: int, other: Sequence[str]) -> int:
    """Return the length of the longest common subsequence of a text of `length` words and another one (Hyyrö, 2004).

    A text is one number with a bit per word, so that a word of the other text costs three operations on numbers.
    """
    rows = full = (1 << length) - 1
    for word in other:
        matches = rows & places.get(word, 0)
        rows = (rows + matches) | (rows - matches) & full
    return length - (rows & full).bit_count()


def f1(prediction: str, references: Sequence[str]) -> float:
    """Return the largest 2·overlap / (words of the prediction + words of the reference) over all references.

    The words are the lower-cased text split at white space. A word that occurs a times in the prediction and b times in
    the reference adds min(a, b) to the overlap. Punctuation and articles are kept. SQuAD's F1 removes them.
    """
    own = Counter(prediction.lower().split())
    others = [Counter(one.lower().split()) for one in strings(references, "reference")]
    return max(2 * (own & other).total() / max(1, own.total() + other.total()) for other in others)


def distinct(texts: Sequence[str], n: int, units: Units = words) -> float:
    """Return distinct-n of a group of texts: the number of different n-grams divided by the number of all n-grams.

    n - 1 start markers are put before each text, so that a text has as many n-grams as units. The result is 0 if the
    texts have no units.
    """
    if n < 1:
        raise D5P4Error(f"n={n} must be at least 1")
    grams = [gram for text in strings(texts) for gram in _grams([None] * (n - 1) + list(units(text)), n)]
    return len(set(grams)) / len(grams) if grams else 0.0


def unit_counts(texts: Sequence[str], units: Units = words) -> tuple[int, int]:
    """Return the number of units in a group of texts, and the number of different units."""
    counts = Counter(unit for text in strings(texts) for unit in units(text))
    return counts.total(), len(counts)


def ead(count: int, different: int, vocabulary: int) -> float:
    """Return the expectation-adjusted distinct score, N / (V (1 - ((V - 1) / V)^C)), of a group of texts.

    The group has C = `count` units, and N of them are `different` (see `unit_counts`). The denominator is the expected
    number of different units in C uniform draws from V units. Therefore this score, unlike distinct-1, does not fall
    with the length of the texts (Liu et al., 2022). V is the number of different units in all references. The result is
    0 for texts without units.
    """
    if vocabulary < 1:
        raise D5P4Error(f"vocabulary={vocabulary} must be at least 1")
    expected = -vocabulary * math.expm1(count * math.log1p(-1 / vocabulary)) if vocabulary > 1 else 1.0
    return different / expected if count else 0.0


def empirical_entropy(text: str, units: Units = words) -> float:
    """Return -Σ f log f in nats. f is the relative frequency of a unit in a text. An empty text has entropy 0."""
    counts = np.array(list(Counter(units(text)).values()))
    shares = counts / counts.sum() if len(counts) else np.ones(1)
    return abs(float(-(shares * np.log(shares)).sum()))  # abs turns -0.0 into 0.0


def sentence_bleu(prediction: str, references: Sequence[str]) -> float:
    """Return the BLEU of one text, 0 to 100, over the n-gram orders that fit into the text ("effective order")."""
    return float(bleu_scorer().sentence_score(prediction, strings(references, "reference")).score)


def self_bleu(texts: Sequence[str]) -> float:
    """Return S-BLEU, 0 to 100: the mean BLEU of a text against all other texts of the group. For one text it is 0."""
    texts = strings(texts, "text")
    scores = [sentence_bleu(text, [*texts[:i], *texts[i + 1 :]]) for i, text in enumerate(texts) if len(texts) > 1]
    return sum(scores) / len(texts)


def _grams(row: Sequence[Any], n: int) -> Iterable[tuple[Any, ...]]:
    return zip(*(row[i:] for i in range(n)), strict=False)


@cache
def bleu_scorer() -> Any:
    try:
        from sacrebleu.metrics import BLEU
    except ImportError as reason:
        raise D5P4Error("BLEU needs sacrebleu: pip install 'd5p4[eval]'") from reason
    return BLEU(effective_order=True, max_ngram_order=ORDER)


def strings(texts: Sequence[str], needed: str = "") -> list[str]:
    """Return the texts as a list. Raise an error if they are not a list of strings, or lack a text that is `needed`."""
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts) or (needed and not len(texts)):
        what = f"a list of at least one {needed}" if needed else "a list of strings"
        raise D5P4Error(f"{what} is needed, got {texts!r:.60}")
    return list(texts)
