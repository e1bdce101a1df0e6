"""Helpers that the judge and the encoder share: checks of arguments, batches of rows, files inside packages."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from ..errors import D5P4Error


def strings(texts: Sequence[str]) -> Sequence[str]:
    """Return the texts unchanged, or raise an error if they are not a list of strings."""
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise D5P4Error(f"texts must be a list of strings, not {texts!r:.60}")
    return texts


def whole(name: str, value: int | None) -> int | None:
    """Return the value, or raise an error if it is neither None nor a whole number of at least 1."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise D5P4Error(f"{name}={value!r} must be a whole number of at least 1")
    return value


def batches(lengths: Sequence[int], batch_size: int, max_tokens: int | None) -> Iterator[list[int]]:
    """Yield batches of row numbers. Rows of length 0 or less are left out.

    Rows of similar length share a batch, so that little padding is needed. A batch has `batch_size` rows. With
    `max_tokens`, a batch has as many rows as fit into that number of tokens, padding included, but at least one row.
    """
    whole("batch_size", batch_size)
    whole("max_tokens_per_batch", max_tokens)
    batch: list[int] = []
    for i in sorted((i for i, length in enumerate(lengths) if length > 0), key=lambda i: lengths[i]):
        full = len(batch) == batch_size if max_tokens is None else (len(batch) + 1) * lengths[i] > max_tokens
        if batch and full:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad rows of token ids on the right and return ids and mask, [R, T] int64. The mask is 0 at the padding."""
    inputs = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    mask = torch.zeros_like(inputs)
    for i, row in enumerate(rows):
        inputs[i, : len(row)] = torch.tensor(row)
        mask[i, : len(row)] = 1
    return inputs.to(device), mask.to(device)


def package_file(package: str, pattern: str, missing: str) -> Path:
    """Return the package's first file that matches, without importing it. `missing`: the message if no file matches."""
    spec = importlib.util.find_spec(package)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        matches = sorted(Path(place).glob(pattern))
        if matches:
            return matches[0]
    raise D5P4Error(missing)
