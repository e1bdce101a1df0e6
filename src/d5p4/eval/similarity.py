"""Cosines of texts: sentence embeddings from a model of sentence-transformers, and their mean cosine S-COS."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import D5P4Error

Embed = Callable[[Sequence[str]], "NDArray[np.floating]"]
"""`embed(texts)` returns one vector of length 1 per text: [n, D]."""


def sentence_encoder(folder: str | Path, device: object = None, remote_code: bool = False) -> Embed:
    """Return an `Embed` by the sentence-transformers model in a folder. Its own code runs only with `remote_code`."""
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as reason:
        raise D5P4Error("similarity needs sentence-transformers: pip install 'd5p4[eval]'") from reason
    try:
        where = None if device is None else str(device)
        model = SentenceTransformer(str(folder), device=where, trust_remote_code=remote_code, local_files_only=True)
    except Exception as reason:  # the library raises errors of many unrelated classes
        first = (str(reason).strip() or "no reason given").splitlines()[0]
        what = f"cannot be read as a sentence encoder ({type(reason).__name__}: {first})"
        raise D5P4Error(f"{str(folder)!r} {what}") from reason

    def embed(texts: Sequence[str]) -> NDArray[np.floating]:
        return model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False)

    return embed


def average_cosine(vectors: ArrayLike) -> float:
    """Return S-COS, the mean cosine over all pairs of rows of [n, D]: (ΣS - n) / (n (n - 1)) with the cosines S [n, n].

    S-COS is 0 for one row or none. A row of zeros has no direction, so we define its cosine with every row as 0.
    """
    rows = np.asarray(vectors, dtype=np.float64)
    if rows.ndim != 2 or not np.isfinite(rows).all():
        raise D5P4Error(f"vectors must be finite numbers of shape [texts, numbers], got shape {rows.shape}")
    n = len(rows)
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    unit = rows / np.where(lengths > 0, lengths, 1)
    # ΣS is the squared length of the sum of the unit rows. The diagonal of S sums to n, or less if a row is zero.
    return float((np.square(unit.sum(0)).sum() - np.square(unit).sum()) / (n * (n - 1))) if n > 1 else 0.0
