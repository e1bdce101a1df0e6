"""Training relies on this: tokens give the text exactly, one separator between books, no half-written files."""

import lzma
import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from d5p4.errors import D5P4Error
from d5p4_lab.train.corpus import END_TEXT, MASK, Corpus, load, normalise, pieces, prepare

BOOKS = ["The cat sat.\nIt didn't move,\n\n  he said.", "A dog — and “two” cats!\nThe end.", "The cat, again; the dog."]
VOCABULARY = 300


def write(folder: Path, train: str, val: str = "The dog sat.\n") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "train.txt").write_bytes(train.encode())
    (folder / "val.txt").write_bytes(val.encode())
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write(tmp_path / "data", f"\n{END_TEXT}\n".join(BOOKS) + "\n")


def split(ids: np.ndarray, at: int) -> list[list[int]]:
    return [part[part != at].tolist() for part in np.split(ids, np.flatnonzero(ids == at))]


def test_tokens_decode_to_the_books_and_bytes_count_them_without_separators(data: Path, tmp_path: Path) -> None:
    corpus = prepare(data, tmp_path / "out", VOCABULARY)
    end = corpus.tokenizer.token_to_id(END_TEXT)
    assert [corpus.tokenizer.decode(ids) for ids in split(corpus.train, end)] == BOOKS
    assert (corpus.train == end).sum() == len(BOOKS) - 1
    assert corpus.train_bytes == sum(len(book.encode()) for book in BOOKS)
    assert corpus.val_bytes == len("The dog sat.") and corpus.tokenizer.decode(corpus.val) == "The dog sat."
    assert corpus.train.dtype == corpus.val.dtype == np.uint16 and isinstance(corpus.train, np.memmap)


def test_the_vocabulary_is_exact_with_the_mask_last_and_the_same_from_xz(data: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    packed.mkdir()
    for name in ("train.txt", "val.txt"):
        (packed / f"{name}.xz").write_bytes(lzma.compress((data / name).read_bytes()))
    plain, unpacked = prepare(data, tmp_path / "a", VOCABULARY), prepare(packed, tmp_path / "b", VOCABULARY)
    assert same(plain, unpacked)
    first = plain.tokenizer
    assert first.get_vocab_size() == VOCABULARY
    assert (first.token_to_id(END_TEXT), first.token_to_id(MASK)) == (VOCABULARY - 2, VOCABULARY - 1)
    every_byte = bytes(range(1, 256)).decode("latin-1")
    assert first.decode(first.encode(every_byte).ids) == every_byte


def test_normalising_changes_only_invisible_characters() -> None:
    for text, expected in [
        ("\ufeffa\r\nb\rc\n", "a\nb\nc"),
        ("\n \n  a \t\nb\u200b \n\t\n", "  a\nb"),
        ("a\n\n\nb", "a\n\n\nb"),  # white space inside a book stays
        ("“x”—don’t _you_  go\nthe line is not joined", "“x”—don’t _you_  go\nthe line is not joined"),
        (" \n\u2060\n", ""),
    ]:
        assert normalise(text) == expected, repr(text)
        assert normalise(expected) == expected, repr(text)


def test_books_are_separated_once_whatever_blank_lines_and_empty_books_there_are(tmp_path: Path) -> None:
    text = f"{END_TEXT}\n\n{BOOKS[0]} \n\n{END_TEXT}\n \n{END_TEXT}\r\n\ufeff{BOOKS[1]}\n{END_TEXT}\n"
    corpus = prepare(write(tmp_path / "data", text), tmp_path / "out", 260)
    assert [corpus.tokenizer.decode(ids) for ids in split(corpus.train, 258)] == BOOKS[:2]


def test_a_special_token_that_is_spelled_out_in_a_book_is_ordinary_text(tmp_path: Path) -> None:
    book = f"They wrote {MASK} and {END_TEXT} here."
    corpus = prepare(write(tmp_path / "data", "Something else.", book), tmp_path / "out", 260)
    assert corpus.val.max() < 258
    assert corpus.tokenizer.decode(corpus.val) == book


def test_a_held_out_book_that_is_also_trained_on_is_left_out(tmp_path: Path) -> None:
    """Another edition of the same book counts too; here every twentieth word differs."""
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghij", k=5)) for _ in range(1200)]
    known, other = words[:600], words[600:]
    edition = ["xyz" if i % 20 == 0 else word for i, word in enumerate(known)]
    train = f"Another book.\n{END_TEXT}\n{' '.join(known)}\n"
    val = f"{' '.join(other)}\n{END_TEXT}\n{' '.join(edition)}\n"
    corpus = prepare(write(tmp_path / "data", train, val), tmp_path / "out", VOCABULARY)
    assert corpus.left_out == 1
    assert corpus.tokenizer.decode(corpus.val) == " ".join(other)
    assert corpus.val_bytes == len(" ".join(other))
    with pytest.raises(D5P4Error, match="every book of .*val.txt is in the training text"):
        prepare(write(tmp_path / "again", train, " ".join(edition)), tmp_path / "no", VOCABULARY)


def test_cutting_a_book_into_pieces_changes_no_token_and_pieces_are_short() -> None:
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)

    def cut(text: str) -> list[str]:
        return [word for word, _ in words.pre_tokenize_str(text)]

    draw = random.Random(0)
    alphabet = "\n" * 6 + "a'.7" * 2 + "st —é \t\r\u00a0\u0085\u180e\u2028\x1c"
    several = 0
    for _ in range(1000):
        text = "".join(draw.choices(alphabet, k=draw.randint(1, 16)))
        parts = list(pieces(text, size=1))
        several += len(parts) > 1
        assert "".join(parts) == text
        assert [word for part in parts for word in cut(part)] == cut(text), (text, parts)
    assert several > 300
    assert cut("a\n\n") + cut("b") != cut("a\n\nb"), "cutting behind a blank line is exact too: no need for this care"

    book = "\n".join("x" * 99 for _ in range(1000))
    sizes = [len(piece) for piece in pieces(book, size=1000)]
    assert sum(sizes) == len(book) and max(sizes) <= 1100 and min(sizes[:-1]) >= 1000


def test_a_complete_folder_is_only_mapped(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made = prepare(data, out, VOCABULARY)
    assert sorted(p.name for p in out.iterdir()) == ["corpus.json", "tokenizer.json", "train.npy", "val.npy"]
    before = {p: p.stat().st_mtime_ns for p in out.iterdir()}
    again = prepare(data, out, VOCABULARY)
    assert {p: p.stat().st_mtime_ns for p in out.iterdir()} == before
    assert same(made, again) and same(made, load(out))


def test_an_incomplete_folder_is_made_again(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made = prepare(data, tmp_path / "whole", VOCABULARY)
    for damage in ("corpus.json", "tokenizer.json", "train.npy", "val.npy"):
        for missing in (True, False):
            prepare(data, out, VOCABULARY)
            if missing:
                (out / damage).unlink()
            else:
                (out / damage).write_bytes((out / damage).read_bytes()[:-20])
            with pytest.raises(D5P4Error, match="no complete corpus"):
                load(out)
            assert same(made, prepare(data, out, VOCABULARY)), (damage, missing)


def test_a_folder_made_from_something_else_is_left_alone(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made = prepare(data, out, VOCABULARY)
    with pytest.raises(D5P4Error, match="BPE 300.*BPE 280"):
        prepare(data, out, 280)
    with pytest.raises(D5P4Error, match="has another corpus"):
        prepare(write(tmp_path / "other", "\n".join(BOOKS) * 2), out, VOCABULARY)
    assert same(made, load(out))


def test_a_given_tokenizer_is_taken_as_it_is(data: Path, tmp_path: Path) -> None:
    made = prepare(data, tmp_path / "a", VOCABULARY)
    other = write(tmp_path / "other", "Something else.")
    taken = prepare(other, tmp_path / "b", tokenizer=tmp_path / "a" / "tokenizer.json")
    assert taken.tokenizer.to_str() == made.tokenizer.to_str()
    assert taken.train.tolist() == made.tokenizer.encode("Something else.").ids


def test_a_tokenizer_that_would_not_give_exact_tokens_is_refused(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    for words, special, message in [
        (pre_tokenizers.Whitespace(), [END_TEXT], "not plain byte-level"),
        (pre_tokenizers.ByteLevel(add_prefix_space=True), [END_TEXT], "not plain byte-level"),
        (pre_tokenizers.ByteLevel(add_prefix_space=False), [MASK], "has no token"),
    ]:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = words
        tokenizer.add_special_tokens(special)
        tokenizer.save(str(path))
        with pytest.raises(D5P4Error, match=f"tokenizer.json.*{message}"):
            prepare(data, tmp_path / "out", tokenizer=path)
    path.write_text("{}")
    with pytest.raises(D5P4Error, match="tokenizer.json cannot be read"):
        prepare(data, tmp_path / "out", tokenizer=path)


def test_bad_input_is_named(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(D5P4Error, match="no folder .*nowhere"):
        prepare(tmp_path / "nowhere", out)
    with pytest.raises(D5P4Error, match="not 100"):
        prepare(data, out, 100)
    with pytest.raises(D5P4Error, match="train.txt is too short for a vocabulary of 8192"):
        prepare(data, out)
    (data / "train.txt").write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(D5P4Error, match="train.txt is not UTF-8"):
        prepare(data, out, VOCABULARY)
    (data / "train.txt").write_text(f" \n{END_TEXT}\n")
    with pytest.raises(D5P4Error, match="train.txt has no text"):
        prepare(data, out, VOCABULARY)
    (data / "train.txt").unlink()
    with pytest.raises(D5P4Error, match="neither train.txt nor train.txt.xz"):
        prepare(data, out)
    (data / "train.txt.xz").write_bytes(lzma.compress(b"some text")[:-10])
    with pytest.raises(D5P4Error, match="train.txt.xz cannot be read"):
        prepare(data, out, 260)
    assert not (out / "corpus.json").exists()


def same(one: Corpus, other: Corpus) -> bool:
    return (
        np.array_equal(one.train, other.train)
        and np.array_equal(one.val, other.val)
        and (one.train_bytes, one.val_bytes) == (other.train_bytes, other.val_bytes)
        and one.tokenizer.to_str() == other.tokenizer.to_str()
    )
