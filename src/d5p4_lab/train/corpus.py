"""From a folder of books to token files that training maps into memory.

`prepare` reads `train.txt` and `val.txt` (or `.xz`): whole books, one paragraph a line, separated by a line
`<|endoftext|>`. It trains a byte-level BPE on the training text, encodes both files and writes `tokenizer.json`,
`train.npy`, `val.npy` and `corpus.json`. `load` maps such a folder again, without the text.

`normalise` cleans each book. The tokens decode to exactly the cleaned text, and the byte counts are of that text
without the separators.
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
from d5p4.eval.tasks.corpus import END_TEXT, Corpus, load, normalise, read_tokenizer, stored

MASK = "<|mask|>"

FORMAT = 2  # of the folder; goes up when the same text would give other files
SMALLEST, LARGEST = 256 + 2, 1 << 15  # vocabularies: all bytes and two special tokens; what int16 can hold
PIECE = 1 << 16  # characters encoded as one string
BATCH = 32  # such strings encoded at once; bounds the memory
RUN, SHARED = 16, 0.05  # a held-out book may share this part of its runs of so many tokens with the training text

# ByteLevel's pattern always makes the line feed before a visible character a word of its own, and white space before it
# another. So a cut in front of that line feed changes no word. A cut behind it would: at the end of a string, but only
# there, two line feeds are one word.
_CUT = re.compile(r"\n(?=[!-~])")


def prepare(data: Path, out: Path, vocabulary: int = 8192, tokenizer: Path | None = None) -> Corpus:
    """Tokens of the books in the folder `data`, written to `out`; when `out` has them complete, they are only mapped.

    The BPE has exactly `vocabulary` tokens, the last two being `END_TEXT` and `MASK`. A `tokenizer.json` given instead
    (byte-level, with `END_TEXT`) is taken as it is, and `vocabulary` is not used.
    A held-out book that is in the training text too, perhaps in another edition, is left out.
    An `out` that was made from other data or another tokenizer is an error, since a trained model may depend on it.
    """
    data, out = Path(data), Path(out)
    sources = {name: _source(data, name) for name in ("train", "val")}
    given = None if tokenizer is None else _given(Path(tokenizer))
    if given is None and not SMALLEST <= vocabulary <= LARGEST:
        raise D5P4Error(f"vocabulary must be between {SMALLEST} and {LARGEST}, not {vocabulary}")
    recipe = {
        "format": FORMAT,
        "tokenizer": f"BPE {vocabulary}" if given is None else hashlib.sha256(given.to_str().encode()).hexdigest(),
        "sources": {path.name: path.stat().st_size for path in sources.values()},
    }
    if (made_before := stored(out)) is not None:
        corpus, description = made_before
        if description["recipe"] != recipe:
            before = description["recipe"]
            raise D5P4Error(f"{out} was prepared otherwise ({before}, not {recipe}): choose another folder")
        return corpus

    out.mkdir(parents=True, exist_ok=True)
    (out / "corpus.json").unlink(missing_ok=True)  # written last: a folder without it is not complete
    made = given or _trained(sources["train"], vocabulary)
    with _replacing(out / "tokenizer.json") as file:
        file.write(made.to_str(pretty=True).encode())
    counts = {"train": _encode(sources["train"], made, out / "train.npy")}
    seen = np.unique(runs(np.load(out / "train.npy", mmap_mode="r")))
    counts["val"] = _encode(sources["val"], made, out / "val.npy", seen)
    with _replacing(out / "corpus.json") as file:
        file.write(json.dumps({"recipe": recipe, **counts}, indent=2).encode() + b"\n")
    return load(out)


def pieces(book: str, size: int = PIECE) -> Iterator[str]:
    """The book in parts of `size` characters or more that give, one after the other, exactly the tokens of the whole.

    A part ends with a paragraph, so one without line feeds stays whole."""
    start = 0
    for cut in _CUT.finditer(book):
        if cut.start() - start >= size:
            yield book[start : cut.start()]
            start = cut.start()
    yield book[start:]


def runs(tokens: np.ndarray) -> np.ndarray:
    """uint64 [n - RUN + 1]: a hash of every RUN tokens in a row of tokens [n]."""
    count = max(0, len(tokens) - RUN + 1)
    mixed = np.zeros(count, np.uint64)
    for i in range(RUN):
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        mixed += tokens[i : i + count]
    return mixed


def _shared(book: np.ndarray, seen: np.ndarray) -> float:
    """The part of a book's runs that are among those seen (sorted)."""
    mine = runs(book)
    if not len(mine) or not len(seen):
        return 0.0
    return float((seen[np.searchsorted(seen, mine).clip(max=len(seen) - 1)] == mine).mean())


def _source(data: Path, name: str) -> Path:
    if not data.is_dir():
        raise D5P4Error(f"no folder {data} (with train.txt and val.txt, plain or .xz)")
    for path in (data / f"{name}.txt", data / f"{name}.txt.xz"):
        if path.is_file():
            return path
    raise D5P4Error(f"{data} has neither {name}.txt nor {name}.txt.xz")


def _books(source: Path) -> Iterator[str]:
    """The books of a file, normalised; empty ones are left out, and a file without any is an error."""
    found = False
    lines: list[str] = []
    try:
        opener = lzma.open if source.suffix == ".xz" else open
        with opener(source, "rt", encoding="utf-8") as file:
            for line in chain(file, [END_TEXT]):
                if line.strip() != END_TEXT:
                    lines.append(line)
                    continue
                if book := normalise("".join(lines)):
                    found = True
                    yield book
                lines = []
    except UnicodeDecodeError as error:
        raise D5P4Error(f"{source} is not UTF-8 text: {error}") from error
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise D5P4Error(f"{source} cannot be read: {error}") from error
    if not found:
        raise D5P4Error(f"{source} holds no text")


def _trained(source: Path, vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - 2, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator((piece for book in _books(source) for piece in pieces(book)), trainer)
    # Special tokens given to the trainer would come first; public MDLM has its mask last.
    tokenizer.add_special_tokens([END_TEXT, MASK])
    if (size := tokenizer.get_vocab_size()) != vocabulary:
        raise D5P4Error(f"{source} is too short for a vocabulary of {vocabulary}: it gives {size}; ask for fewer")
    return tokenizer


def _given(path: Path) -> Tokenizer:
    tokenizer = read_tokenizer(path)
    told = json.loads(tokenizer.to_str())
    words = told["pre_tokenizer"] or {"type": None}
    if told["normalizer"] or words["type"] != "ByteLevel" or words["add_prefix_space"] or not words["use_regex"]:
        raise D5P4Error(f"{path} is not plain byte-level: ByteLevel without a prefix space, and no normalizer")
    if tokenizer.token_to_id(END_TEXT) is None:
        raise D5P4Error(f"{path} has no token {END_TEXT}")
    if tokenizer.token_to_id(MASK) != tokenizer.get_vocab_size() - 1:
        raise D5P4Error(f"{path} does not have {MASK} as its last token")
    if (largest := max(tokenizer.get_vocab().values())) >= LARGEST:
        raise D5P4Error(f"{path} has the token id {largest}, and ids of {LARGEST} or more cannot be stored")
    return tokenizer


def _encode(source: Path, tokenizer: Tokenizer, target: Path, seen: np.ndarray | None = None) -> dict[str, int]:
    """Writes the tokens of a file, without books made of runs already seen; returns its counts."""
    literal = Tokenizer.from_str(tokenizer.to_str())
    literal.encode_special_tokens = True  # a book may spell a special token: its letters are meant
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
        raise D5P4Error(f"every book of {source} is in the training text: hold out others")
    tokens = np.concatenate(parts)
    with _replacing(target) as file:
        np.save(file, tokens)
    return {"documents": documents, "bytes": size, "tokens": len(tokens), "left_out": left_out}


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that gets its name when it is whole."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        yield file
    partial.replace(path)
