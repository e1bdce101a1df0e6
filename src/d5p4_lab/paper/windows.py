"""Windows of real text, and masks laid over texts: what the experiments that measure a model have in common."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from d5p4.errors import D5P4Error
from d5p4.models.base import NativeModel

from .setup import Setup


class Window(NamedTuple):
    ids: list[int]  # the model's tokens
    text: str


def real_windows(setup: Setup, length: int, count: int) -> list[Window]:
    """`count` windows of `length` tokens of the file `setup.data`; fewer come first in the same order.

    They are written down as rows `texts`, so that resuming needs no file; a file that says otherwise is an error.
    """
    lines = setup.measured("texts", model=setup.named.rsplit("/", 1)[-1], weights=setup.weights, length=length)
    if setup.data is not None:
        for number, window in enumerate(_cut(setup, length, count)):
            held = lines.get(number)
            if held is None:
                lines.add(number, {"ids": window.ids, "text": window.text})
            elif held["ids"] != window.ids:
                raise D5P4Error(f"{lines.path} was made with another text than {setup.data}; give another --out")
    found = [lines.get(number) for number in range(count)]
    if None in found:
        raise D5P4Error(f"{setup.experiment.name} needs a text file: give --data")
    return [Window(row["ids"], row["text"]) for row in found if row is not None]


def _cut(setup: Setup, length: int, count: int) -> list[Window]:
    """Windows of consecutive tokens, documents taking turns; none that is cut inside a character."""
    from d5p4.eval.tasks.prose import read_documents
    from d5p4.eval.tasks.task import shuffled

    assert setup.data is not None
    documents = read_documents(setup.data, None)
    tokens = [_encode(setup.model, documents[i]) for i in shuffled(len(documents), setup.seed, "documents")]
    order = [
        [ids[length * i : length * (i + 1)] for i in shuffled(len(ids) // length, setup.seed, "windows")]
        for ids in tokens
    ]
    found: list[Window] = []
    for ids in (ids for turn in zip_longest(*order) for ids in turn if ids is not None):
        text = _decode(setup.model, ids)
        if "\ufffd" not in text and text.strip():
            found.append(Window(ids, text))
        if len(found) == count:
            return found
    raise D5P4Error(f"{setup.data} has {len(found)} windows of {length} tokens, {count} are asked for")


def _encode(model: NativeModel, text: str) -> list[int]:
    if model.tokenizer is None:
        raise D5P4Error(f"{model.name!r} has no tokenizer, so no text can be shown to it")
    return model.tokenizer.encode(text)


def _decode(model: NativeModel, ids: Sequence[int]) -> str:
    assert model.tokenizer is not None
    return model.tokenizer.decode(ids)


def chance(*words: object) -> np.random.Generator:
    """A random stream named by words: the same on every machine, another for every name."""
    digest = hashlib.sha256("\0".join(map(str, words)).encode()).digest()
    return np.random.default_rng(np.frombuffer(digest, np.uint32).tolist())


def random_masks(source: np.random.Generator, counts: Sequence[int], length: int) -> Tensor:
    """[len(counts), length] bool: row i is True at counts[i] positions, any of them."""
    place = source.random((len(counts), length)).argsort(axis=1).argsort(axis=1)
    return torch.from_numpy(place < np.asarray(counts)[:, None])


def spread_counts(source: np.random.Generator, draws: int, length: int) -> list[int]:
    """[draws] numbers of masks, evenly spread over 1..length from a random offset, as `d5p4.loglikelihood` has them."""
    places = (source.random() * length + np.arange(draws) * (length / draws)) % length
    return (1 + np.minimum(places.astype(int), length - 1)).tolist()
