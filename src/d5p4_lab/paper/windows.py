"""Windows of real text, and random masks, for experiments that measure a model's predictions without decoding."""

import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor

from d5p4.errors import D5P4Error

from .rows import Row, Source
from .setup import Setup

FORWARD = 16384  # at most this many tokens per forward


def text_length(setup: Setup) -> int:
    return min(setup["length"], setup.outline.max_length) if setup.decoding else setup["length"]


def real_windows(setup: Setup, length: int, count: int) -> Source:
    """The source of `count` windows of real text, each `length` tokens of the model, in an order set by the seed.

    The windows are stored on this machine but not committed. A continued run reads them and needs no text file.
    """

    def make(keys: Sequence[str]) -> dict[str, Row]:
        windows = _cut(setup, length, count)
        return {key: windows[int(key)] for key in keys}

    keys = [str(number) for number in range(count)]
    made_with = {"length": length, **setup.model_and()}
    return setup.source("texts", keys, make, together=count, kept=False, early=True, **made_with)


def check_same_text(setup: Setup, source: Source, length: int) -> None:
    rows, data = setup.rows(source), setup.data_of("text")
    if not setup.decoding or data is None or not len(rows):
        return
    for number, window in enumerate(_cut(setup, length, len(rows))):
        if str(number) in rows and rows[str(number)]["ids"] != window["ids"]:
            raise D5P4Error(f"{rows.path} was made from another text than {data}; give another --out")


@lru_cache(maxsize=2)
def _cut(setup: Setup, length: int, count: int) -> list[Row]:
    """Cut documents into windows of tokens, and take one of each document in turn, if it splits no character."""
    from .tasks import each_document, shuffled

    data, codec = setup.data_of("text"), setup.outline.tokenizer
    if data is None:
        raise D5P4Error(f"{setup.experiment.name} needs a text file: give --data text=FILE")
    if codec is None:
        raise D5P4Error(f"{setup.named!r} has no tokenizer, so it cannot read text")
    order = shuffled(sum(1 for _ in each_document(data)), setup.seed, "documents")

    def pieces(number: int, text: str) -> Iterator[tuple[int, list[int]]]:
        ids = codec.encode(text)
        for i in shuffled(len(ids) // length, setup.seed, "windows"):
            yield number, ids[length * i : length * (i + 1)]

    def in_turn() -> Iterator[tuple[int, list[int]] | None]:
        """The file is read some documents at a time. A document is tokenised when it is its turn."""
        cut = []
        for start in range(0, len(order), 4 * count):
            wanted = set(order[start : start + 4 * count])
            texts = {number: text for number, text in enumerate(each_document(data)) if number in wanted}
            for number in order[start : start + 4 * count]:
                cut.append(pieces(number, texts[number]))
                yield next(cut[-1], None)
        for turn in zip_longest(*cut):
            yield from turn

    windows: list[Row] = []
    for number, ids in (window for window in in_turn() if window is not None):
        text = codec.decode(ids)
        if "\ufffd" not in text and text.strip():
            windows.append({"ids": ids, "text": text, "document": number})
        if len(windows) == count:
            return windows
    raise D5P4Error(f"{data} has only {len(windows)} windows of {length} tokens, but {count} are needed")


def chance(*words: object) -> np.random.Generator:
    """A random generator whose seed is a hash of `words`. Equal `words` give the same numbers on every machine."""
    digest = hashlib.sha256("\0".join(map(str, words)).encode()).digest()
    return np.random.default_rng(np.frombuffer(digest, np.uint32).tolist())


def random_masks(source: np.random.Generator, counts: Sequence[int], length: int) -> Tensor:
    """Draw random masks [len(counts), length]. Row i is True at counts[i] random positions."""
    place = source.random((len(counts), length)).argsort(axis=1).argsort(axis=1)
    return torch.from_numpy(place < np.asarray(counts)[:, None])


def spread_counts(source: np.random.Generator, draws: int, length: int) -> list[int]:
    """Return `draws` numbers of tokens to mask, spread evenly over 1..length from a random offset."""
    places = (source.random() * length + np.arange(draws) * (length / draws)) % length
    return (1 + np.minimum(places.astype(int), length - 1)).tolist()
