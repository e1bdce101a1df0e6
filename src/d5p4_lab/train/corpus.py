"""Turns a folder of books into token files that training maps into memory.

`prepare` reads `train.txt` and `val.txt` (or `.xz`), which have one paragraph per line and a line `<|endoftext|>`
between two books. `prepare` trains a byte-level BPE on the training text, encodes both files and writes
`tokenizer.json`, `train.npy`, `val.npy` and `corpus.json`. `load` maps the token files of such a folder and does not
need the texts.

`normalise` cleans each book. The tokens decode to exactly the cleaned text, and the byte counts are those of the
cleaned text without the separators.
"""

import hashlib
import json
import lzma
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import IO

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from d5p4.errors import D5P4Error

from .corpus_files import END_TEXT, Corpus, load, normalise, read_tokenizer, stored

MASK = "<|mask|>"

FORMAT = 2  # the version of the folder's format; increase it whenever new code writes other files for the same text
SMALLEST, LARGEST = 256 + 2, 1 << 15  # the least has all bytes and two special tokens; the largest fits into int16
PIECE = 1 << 16  # a book is encoded in strings of at least this many characters
BATCH = 32  # at most this many strings are encoded at once, to limit the memory
RUN = 16  # a run is this many consecutive tokens
SHARED = 0.05  # a held-out book is left out if more than this share of its runs is in the training text

# ByteLevel splits text into words. A line feed before a visible character is always a word of its own.
# The white space before that line feed is another word. So cutting the text before such a line feed changes no word.
# A cut after the line feed would change words, because two line feeds at the end of a string form one word.
_CUT = re.compile(r"\n(?=[!-~])")


def prepare(data: Path, out: Path, vocabulary: int = 8192, tokenizer: Path | None = None) -> Corpus:
    """Write the tokens of the books in the folder `data` to `out`, unless they are there, and map the token files.

    The BPE has exactly `vocabulary` tokens, and the last two tokens are `END_TEXT` and `MASK`. If `tokenizer` names a
    tokenizer.json (byte-level, with `END_TEXT`), that tokenizer is used unchanged and `vocabulary` is ignored.
    Held-out books that are also in the training text, perhaps in another edition, are left out.
    If `out` has a corpus of other data or another tokenizer, an error is raised: a trained model may need that corpus.
    """
    data, out = Path(data), Path(out)
    sources = {name: _source(data, name) for name in ("train", "val")}
    own = None if tokenizer is None else _read_own(Path(tokenizer))
    if own is None and not SMALLEST <= vocabulary <= LARGEST:
        raise D5P4Error(f"vocabulary must be between {SMALLEST} and {LARGEST}, not {vocabulary}")
    recipe = {
        "format": FORMAT,
        "tokenizer": f"BPE {vocabulary}" if own is None else hashlib.sha256(own.to_str().encode()).hexdigest(),
        "sources": {path.name: path.stat().st_size for path in sources.values()},
    }
    if (existing := stored(out)) is not None:
        corpus, description = existing
        if description["recipe"] != recipe:
            before = description["recipe"]
            raise D5P4Error(f"{out} has another corpus ({before}, not {recipe}): choose another folder")
        return corpus

    out.mkdir(parents=True, exist_ok=True)
    (out / "corpus.json").unlink(missing_ok=True)  # corpus.json is written last; a folder without it is incomplete
    used = own or _trained(sources["train"], vocabulary)
    with _replacing(out / "tokenizer.json") as file:
        file.write(used.to_str(pretty=True).encode())
    counts = {"train": _encode(sources["train"], used, out / "train.npy")}
    seen = np.unique(runs(np.load(out / "train.npy", mmap_mode="r")))
    counts["val"] = _encode(sources["val"], used, out / "val.npy", seen)
    with _replacing(out / "corpus.json") as file:
        file.write(json.dumps({"recipe": recipe, **counts}, indent=2).encode() + b"\n")
    return load(out)


def pieces(book: str, size: int = PIECE) -> Iterator[str]:
    """Cut a book into parts of at least `size` characters. The tokens of all parts are exactly the tokens of the book.

    A part ends at the end of a paragraph, so a book without line feeds is one part."""
    start = 0
    for cut in _CUT.finditer(book):
        if cut.start() - start >= size:
            yield book[start : cut.start()]
            start = cut.start()
    yield book[start:]


def runs(tokens: np.ndarray) -> np.ndarray:
    """Return uint64 [n - RUN + 1]: the hashes of all runs of RUN consecutive tokens in `tokens` [n]."""
    count = max(0, len(tokens) - RUN + 1)
    mixed = np.zeros(count, np.uint64)
    for i in range(RUN):
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        mixed += tokens[i : i + count]
    return mixed


def _shared(book: np.ndarray, seen: np.ndarray) -> float:
    """Return the share of a book's runs (see `runs`) whose hash is in `seen`, a sorted array of hashes."""
    hashes = runs(book)
    if not len(hashes) or not len(seen):
        return 0.0
    return float((seen[np.searchsorted(seen, hashes).clip(max=len(seen) - 1)] == hashes).mean())


def _source(data: Path, name: str) -> Path:
    if not data.is_dir():
        raise D5P4Error(f"there is no folder {data}: give one with train.txt and val.txt (or .xz)")
    for path in (data / f"{name}.txt", data / f"{name}.txt.xz"):
        if path.is_file():
            return path
    raise D5P4Error(f"{data} has neither {name}.txt nor {name}.txt.xz")


def _books(source: Path) -> Iterator[str]:
    """Yield the normalised books of a file, without empty books. Raise an error if the file has no book."""
    empty = True
    lines: list[str] = []
    try:
        opener = lzma.open if source.suffix == ".xz" else open
        with opener(source, "rt", encoding="utf-8") as file:
            for line in chain(file, [END_TEXT]):
                if line.strip() != END_TEXT:
                    lines.append(line)
                    continue
                if book := normalise("".join(lines)):
                    empty = False
                    yield book
                lines = []
    except UnicodeDecodeError as error:
        raise D5P4Error(f"{source} is not UTF-8 text: {error}") from error
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise D5P4Error(f"{source} cannot be read: {error}") from error
    if empty:
        raise D5P4Error(f"{source} has no text")


def _trained(source: Path, vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - 2, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator((piece for book in _books(source) for piece in pieces(book)), trainer)
    # Special tokens are added after training. The trainer would put them first, but public MDLM's mask is the last id.
    tokenizer.add_special_tokens([END_TEXT, MASK])
    if (size := tokenizer.get_vocab_size()) != vocabulary:
        raise D5P4Error(f"{source} is too short for a vocabulary of {vocabulary}: give --vocabulary {size} or less")
    return tokenizer


def _read_own(path: Path) -> Tokenizer:
    """Read the user's own tokenizer. Raise an error if decoded tokens might differ from the encoded text."""
    tokenizer = read_tokenizer(path)
    parts = json.loads(tokenizer.to_str())
    words = parts["pre_tokenizer"] or {"type": None}
    if parts["normalizer"] or words["type"] != "ByteLevel" or words["add_prefix_space"] or not words["use_regex"]:
        raise D5P4Error(f"{path} is not plain byte-level: use ByteLevel without a prefix space, and no normalizer")
    if tokenizer.token_to_id(END_TEXT) is None:
        raise D5P4Error(f"{path} has no token {END_TEXT}")
    if tokenizer.token_to_id(MASK) != tokenizer.get_vocab_size() - 1:
        raise D5P4Error(f"{path} does not have {MASK} as its last token")
    if (largest := max(tokenizer.get_vocab().values())) >= LARGEST:
        raise D5P4Error(f"{path} has the token id {largest}, but ids must be below {LARGEST}")
    return tokenizer


def _encode(source: Path, tokenizer: Tokenizer, target: Path, seen: np.ndarray | None = None) -> dict[str, int]:
    """Write a file's tokens and return counts. Leave out books with too many runs whose hash is in `seen`."""
    literal = Tokenizer.from_str(tokenizer.to_str())
    literal.encode_special_tokens = True  # text in a book that looks like a special token is ordinary text
    literal.no_truncation()
    literal.no_padding()
    end = np.array([tokenizer.token_to_id(END_TEXT)], dtype=np.uint16)
    parts: list[np.ndarray] = []
    documents = size = left_out = 0
    for text in _books(source):
        texts = list(pieces(text))
        book = np.concatenate(
            [
                np.array(encoding.ids, dtype=np.uint16)
                for first in range(0, len(texts), BATCH)
                for encoding in literal.encode_batch_fast(texts[first : first + BATCH], add_special_tokens=False)
            ]
        )
        if seen is not None and _shared(book, seen) > SHARED:
            left_out += 1
            continue
        parts += [end, book] if documents else [book]
        documents += 1
        size += len(text.encode())
    if not documents:
        raise D5P4Error(f"every book of {source} is in the training text: hold out other books")
    tokens = np.concatenate(parts)
    with _replacing(target) as file:
        np.save(file, tokens)
    return {"documents": documents, "bytes": size, "tokens": len(tokens), "left_out": left_out}


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """Open a partial file for writing, and rename the file to `path` when all bytes are written."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        yield file
    partial.replace(path)
