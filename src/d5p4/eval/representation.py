"""How alike two views of the same items are (CKA), and how alike the items are in one (ACS)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import D5P4Error

Floats = NDArray[np.float64]


def linear_cka(x: ArrayLike, y: ArrayLike) -> float:
    """Linear CKA of x [n, D] and y [n, E], row i of both for the same item: 0 to 1 (Kornblith et al., 2019).

    ⟨K, M⟩ / (‖K‖ ‖M‖) in Frobenius norm, with K = X Xᵀ and M = Y Yᵀ after columns are centred; 0 if a norm is 0. The
    same for any rotation and any scale of x or y.
    """
    a, b = _vectors(x, "x"), _vectors(y, "y")
    if len(a) != len(b):
        raise D5P4Error(f"CKA compares views of the same items: x has {len(a)} rows, y has {len(b)}")
    if len(a) < 2:
        return 0.0
    a, b = _centred(a), _centred(b)
    k, m = a @ a.T, b @ b.T
    norms = np.linalg.norm(k) * np.linalg.norm(m)
    return float((k * m).sum() / norms) if norms > 0 else 0.0


def average_cosine(vectors: ArrayLike) -> float:
    """ACS: the mean cosine of two different rows of [n, D], (ΣS - n) / (n (n - 1)) with S the cosines.

    0 for one row or none. A row of zeros has cosine 0 with every other.
    """
    rows = _vectors(vectors, "vectors")
    n = len(rows)
    if n <= 1:
        return 0.0
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    unit = rows / np.where(lengths > 0, lengths, 1)
    # ΣS is the squared length of the sum of rows; the diagonal is taken off as it came out.
    return float((np.square(unit.sum(0)).sum() - np.square(unit).sum()) / (n * (n - 1)))


def _centred(rows: Floats) -> Floats:
    """Columns of mean 0, and the largest entry 1 so that fourth powers neither overflow nor vanish."""
    size = np.abs(rows).max(initial=0)
    rows = rows / size if size > 0 else rows
    middle = rows - rows.mean(0)
    # Columns that do not vary are left with rounding, which is no signal.
    middle[:, np.ptp(rows, axis=0) == 0] = 0
    return middle


def _vectors(given: ArrayLike, name: str) -> Floats:
    rows = np.asarray(given, dtype=np.float64)
    if rows.ndim != 2:
        raise D5P4Error(f"{name} must have shape [items, numbers], not {rows.shape}")
    if not np.isfinite(rows).all():
        raise D5P4Error(f"{name} holds numbers that are not finite")
    return rows
