"""Training relies on this: tokens give the text exactly, one separator between books, no half-written folders."""

import lzma
import random

import numpy as np
import pytest

from d5p4_lab.train.corpus import END_TEXT, MASK, load, normalise, prepare
from tests.refusals import refusal

BOOKS = ["The cat sat.\nIt didn't move,\n\n  he said.", "A dog — and “two” cats!\nThe end.", "The cat, again; the dog."]
VOCABULARY = 300


def write(folder, train, val="The dog sat.\n"):
    folder.mkdir(exist_ok=True)
    (folder / "train.txt").write_bytes(train.encode())
    (folder / "val.txt").write_bytes(val.encode())
    return folder


@pytest.fixture
def data(tmp_path):
    return write(tmp_path / "data", f"\n{END_TEXT}\n".join(BOOKS) + "\n")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def books(corpus):
    end = corpus.tokenizer.token_to_id(END_TEXT)
    parts = np.split(corpus.train, np.flatnonzero(corpus.train == end))
    return [corpus.tokenizer.decode(part[part != end].tolist()) for part in parts]


def test_tokens_decode_to_the_books_and_bytes_count_them_without_separators(data, tmp_path):
    corpus = prepare(data, tmp_path / "out", VOCABULARY)
    assert books(corpus) == BOOKS
    assert corpus.train_bytes == sum(len(book.encode()) for book in BOOKS)
    assert corpus.val_bytes == len("The dog sat.") and corpus.tokenizer.decode(corpus.val) == "The dog sat."
    assert corpus.train.dtype == corpus.val.dtype == np.uint16 and isinstance(corpus.train, np.memmap)


def test_the_vocabulary_is_exact_with_the_mask_last_and_the_same_from_xz(data, tmp_path):
    packed = tmp_path / "packed"
    packed.mkdir()
    for name in ("train.txt", "val.txt"):
        (packed / f"{name}.xz").write_bytes(lzma.compress((data / name).read_bytes()))
    first = prepare(data, tmp_path / "a", VOCABULARY).tokenizer
    prepare(packed, tmp_path / "b", VOCABULARY)
    for name in ("tokenizer.json", "train.npy", "val.npy"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert first.get_vocab_size() == VOCABULARY
    assert (first.token_to_id(END_TEXT), first.token_to_id(MASK)) == (VOCABULARY - 2, VOCABULARY - 1)
    every_byte = bytes(range(1, 256)).decode("latin-1")
    assert first.decode(first.encode(every_byte).ids) == every_byte


def test_normalising_changes_only_invisible_characters():
    for text, expected in [
        ("\ufeffa\r\nb\rc\n", "a\nb\nc"),
        ("\n \n  a \t\nb\u200b \n\t\n", "  a\nb"),
        ("a\n\n\nb", "a\n\n\nb"),  # white space inside a book stays
        ("“x”—don’t _you_  go\nthe line is not joined", "“x”—don’t _you_  go\nthe line is not joined"),
        (" \n\u2060\n", ""),
    ]:
        assert normalise(text) == expected, repr(text)
        assert normalise(expected) == expected, repr(text)


def test_books_are_separated_once_whatever_blank_lines_and_empty_books_there_are(tmp_path):
    text = f"{END_TEXT}\n\n{BOOKS[0]} \n\n{END_TEXT}\n \n{END_TEXT}\r\n\ufeff{BOOKS[1]}\n{END_TEXT}\n"
    assert books(prepare(write(tmp_path / "data", text), tmp_path / "out", 260)) == BOOKS[:2]


def test_a_special_token_that_is_spelled_out_in_a_book_is_ordinary_text(tmp_path):
    book = f"They wrote {MASK} and {END_TEXT} here."
    corpus = prepare(write(tmp_path / "data", "Something else.", book), tmp_path / "out", 260)
    assert corpus.val.max() < 258 and corpus.tokenizer.decode(corpus.val) == book


def test_a_held_out_book_that_is_also_trained_on_is_left_out(tmp_path):
    """Another edition of the same book counts too; here every twentieth word differs."""
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghij", k=5)) for _ in range(1200)]
    known, other = words[:600], " ".join(words[600:])
    edition = " ".join("xyz" if i % 20 == 0 else word for i, word in enumerate(known))
    train = f"Another book.\n{END_TEXT}\n{' '.join(known)}\n"
    corpus = prepare(write(tmp_path / "data", train, f"{other}\n{END_TEXT}\n{edition}\n"), tmp_path / "out", VOCABULARY)
    assert corpus.left_out == 1 and corpus.tokenizer.decode(corpus.val) == other and corpus.val_bytes == len(other)
    again = write(tmp_path / "again", train, edition)
    assert "val.txt is in the training text" in refusal(prepare, again, tmp_path / "no", VOCABULARY)


def test_a_folder_is_made_once_and_a_damaged_one_is_named(data, tmp_path):
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    partial.mkdir()
    (partial / "train.npy").write_bytes(b"half")  # a stopped run left it
    prepare(data, out, VOCABULARY)
    before = contents(out)
    assert sorted(before) == ["corpus.json", "tokenizer.json", "train.npy", "val.npy"] and not partial.exists()
    assert "holds other files" in refusal(prepare, data, out, VOCABULARY) and contents(out) == before
    for name in ("corpus.json", "tokenizer.json", "train.npy"):
        (out / name).write_bytes(before[name][: len(before[name]) // 2])
        assert "no complete corpus" in refusal(load, out), name
        (out / name).write_bytes(before[name])


def test_bad_input_is_named(data, tmp_path):
    out = tmp_path / "out"
    assert "nowhere" in refusal(prepare, tmp_path / "nowhere", out)
    assert "not 100" in refusal(prepare, data, out, 100)
    assert "train.txt is too short for a vocabulary of 8192" in refusal(prepare, data, out)
    for content, expected in ((b"caf\xe9", "train.txt cannot"), (END_TEXT.encode(), "train.txt has no")):
        (data / "train.txt").write_bytes(content)
        assert expected in refusal(prepare, data, out, VOCABULARY)
    (data / "train.txt").unlink()
    assert "neither train.txt nor train.txt.xz" in refusal(prepare, data, out)
    (data / "train.txt.xz").write_bytes(lzma.compress(b"some text")[:-10])
    assert "train.txt.xz cannot be read" in refusal(prepare, data, out, 260)
    assert not out.exists()
