"""Helpers that the judge and the encoder share: batches of rows, and files inside Python packages."""

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence

from d5p4.errors import D5P4Error
from d5p4.options import whole_number


def batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Yield the numbers of non-empty rows, in batches of similar lengths: as many as fit into `max_tokens`, or one."""
    whole_number("max_tokens_per_batch", max_tokens)
    batch: list[int] = []
    for i in sorted((i for i, length in enumerate(lengths) if length > 0), key=lambda i: lengths[i]):
        if batch and (len(batch) + 1) * lengths[i] > max_tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad rows of token ids on the right and return ids and mask, [R, T] int64. The mask is 0 at the padding."""
    ids = [torch.tensor(row) for row in rows]
    mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
    return pad_sequence(ids, batch_first=True).to(device), mask.to(device)


def package_file(package: str, pattern: str, missing: str) -> Path:
    """Return the package's first file that matches, without importing it. `missing`: the message if no file matches."""
    spec = importlib.util.find_spec(package)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        matches = sorted(Path(place).glob(pattern))
        if matches:
            return matches[0]
    raise D5P4Error(missing)
