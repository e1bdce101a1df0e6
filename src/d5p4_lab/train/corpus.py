"""Turns a folder of books into token files that training maps into memory.

`prepare` reads `train.txt` and `val.txt` (or `.xz`), which have one paragraph per line and a line `<|endoftext|>`
between two books. It trains a byte-level BPE on the training text, encodes both files and writes `tokenizer.json`,
`train.npy`, `val.npy` and `corpus.json`. The tokens decode to exactly the text that `normalise` cleaned, and byte
counts are those of the cleaned text without the separators.
"""

import json
import lzma
import re
import shutil
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from d5p4.errors import D5P4Error

END_TEXT, MASK = "<|endoftext|>", "<|mask|>"
SMALLEST, LARGEST = 256 + 2, 1 << 15  # the least has all bytes and two special tokens; the largest fits into int16
RUN = 16  # a run is this many consecutive tokens
SHARED = 0.05  # a held-out book is left out if more than this share of its runs is in the training text

_INVISIBLE = re.compile("[\u200b\u2060\ufeff]")
_LINE_END = re.compile(r"[ \t]*(?:\r\n|\r|\n)")


class Corpus(NamedTuple):
    """The books as tokens, with `END_TEXT` between two books. The byte counts do not include these separators."""

    train: np.ndarray  # uint16 [n], memory-mapped
    val: np.ndarray  # uint16 [m], memory-mapped
    val_bytes: int
    train_bytes: int
    tokenizer: Tokenizer
    left_out: int = 0  # the number of held-out books that were left out, because the training text has them

    @property
    def size(self) -> str:
        """A sentence with the sizes of the corpus. A continued run must find the same sentence in its saved state."""
        return (
            f"{self.train_bytes:,} bytes of text in {len(self.train):,} tokens; {self.val_bytes:,} bytes of text in "
            f"{len(self.val):,} tokens are held out."
        )


def prepare(data: Path, out: Path, vocabulary: int = 8192) -> Corpus:
    """Write the tokens of the books in the folder `data` to the empty or new folder `out`, and map the token files.

    The BPE has exactly `vocabulary` tokens, and the last two tokens are `END_TEXT` and `MASK`. Held-out books that are
    also in the training text, perhaps in another edition, are left out.
    """
    sources = {name: _source(data, name) for name in ("train", "val")}
    if not SMALLEST <= vocabulary <= LARGEST:
        raise D5P4Error(f"vocabulary must be between {SMALLEST} and {LARGEST}, not {vocabulary}")
    if out.exists() and any(out.iterdir()):
        raise D5P4Error(f"{out} holds other files: choose another folder, or empty it")

    partial = out.with_name(f"{out.name}.partial")  # renamed at the end, so that `out` is complete or not there
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tokenizer = _trained(sources["train"], vocabulary)
    tokenizer.save(str(partial / "tokenizer.json"))
    counts = {"train": _encode(sources["train"], tokenizer, partial / "train.npy")}
    seen = np.unique(runs(np.load(partial / "train.npy", mmap_mode="r")))
    counts["val"] = _encode(sources["val"], tokenizer, partial / "val.npy", seen)
    (partial / "corpus.json").write_text(json.dumps(counts, indent=2) + "\n", encoding="utf-8")
    partial.replace(out)
    return load(out)


def load(out: Path) -> Corpus:
    """Return the corpus that `python -m d5p4_lab train corpus` wrote to `out`."""
    try:
        description = json.loads((out / "corpus.json").read_bytes())
        train, val = (np.load(out / f"{name}.npy", mmap_mode="r") for name in ("train", "val"))
        tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    except Exception as reason:  # the package tokenizers raises plain Exceptions
        raise D5P4Error(f"{out} holds no complete corpus ({reason}): make it again") from reason
    sizes = {name: description[name]["bytes"] for name in ("train", "val")}
    return Corpus(train, val, sizes["val"], sizes["train"], tokenizer, description["val"].get("left_out", 0))


def normalise(book: str) -> str:
    """Return a book with plain line ends, without invisible characters, spaces at line ends and blank lines around it.

    Every line is already a paragraph, so no lines are joined.
    """
    lines = _LINE_END.sub("\n", _INVISIBLE.sub("", book) + "\n").split("\n")
    filled = [i for i, line in enumerate(lines) if line.strip()]
    return "\n".join(lines[filled[0] : filled[-1] + 1]) if filled else ""


def runs(tokens: np.ndarray) -> np.ndarray:
    """Return uint64 [n - RUN + 1]: the hashes of all runs of RUN consecutive tokens in `tokens` [n]."""
    count = max(0, len(tokens) - RUN + 1)
    mixed = np.zeros(count, np.uint64)
    for i in range(RUN):
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        mixed += tokens[i : i + count]
    return mixed


def _shared(hashes: np.ndarray, seen: np.ndarray) -> float:
    """Return the share of hashes that are in `seen`, a sorted array."""
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
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
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
    tokenizer.train_from_iterator(_books(source), trainer)
    # Special tokens are added after training. The trainer would put them first, but public MDLM's mask is the last id.
    tokenizer.add_special_tokens([END_TEXT, MASK])
    if (size := tokenizer.get_vocab_size()) != vocabulary:
        raise D5P4Error(f"{source} is too short for a vocabulary of {vocabulary}: give --vocabulary {size} or less")
    return tokenizer


def _encode(source: Path, tokenizer: Tokenizer, target: Path, seen: np.ndarray | None = None) -> dict[str, int]:
    """Write a file's tokens and return counts. Leave out books with too many runs whose hash is in `seen` (sorted)."""
    literal = Tokenizer.from_str(tokenizer.to_str())
    literal.encode_special_tokens = True  # text in a book that looks like a special token is ordinary text
    end = np.array([tokenizer.token_to_id(END_TEXT)], dtype=np.uint16)
    parts: list[np.ndarray] = []
    documents = size = left_out = 0
    for text in _books(source):
        book = np.array(literal.encode(text, add_special_tokens=False).ids, dtype=np.uint16)
        if seen is not None and _shared(runs(book), seen) > SHARED:
            left_out += 1
            continue
        parts += [end, book] if documents else [book]
        documents += 1
        size += len(text.encode())
    if not documents:
        raise D5P4Error(f"every book of {source} is in the training text: hold out other books")
    tokens = np.concatenate(parts)
    np.save(target, tokens)
    return {"documents": documents, "bytes": size, "tokens": len(tokens), "left_out": left_out}
